# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Can a model write several tokens in one step and lose nothing?
#
# **Lesson 11, DSpark: drafts that are judged.** 35 minutes to read, about a minute to run on one CPU thread, no GPU.
# It builds on lesson 02 (windows) and lesson 09 (experts).
#
# Afterwards you can
# 1. write the rule by which drafted tokens stand or fall, and show that it changes no chance;
# 2. say what makes a good draft, which is not what most people think;
# 3. reckon when drafts pay, and when they cost.

# %%
import copy
import itertools

import torch

import tinyds41 as ds
from tinyds41.cost import kv_bytes, parameters
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_11 import WeightBytes, check_correction, check_depth, check_tokens, chi_square, cost_ratios
from tinyds41.formats import WINDOW
from tinyds41.infer import dspark_drafter, ngram_drafter
from tinyds41.infer.draft import Sampling
from tinyds41.infer.generate import generate_ids
from tinyds41.infer.record_drafts import record_drafts
from tinyds41.infer.simulate import best_fixed, over_best_fixed, simulate
from tinyds41.infer.speculate import Speculation, accept
from tinyds41.infer.step_curve import StepCurve
from tinyds41.show.draft_plots import plot_overlap
from tinyds41.show.explore_draft import draft_steps, draft_view, explore_draft
from tinyds41.show.reliability_plot import plot_reliability
from tinyds41.show.run_plots import plot_curves
from tinyds41.show.schedule_plot import plot_schedule
from tinyds41.train import calibrate
from tinyds41.train.corpus import Corpus, documents
from tinyds41.train.train_draft import draft_step, train_draft

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run
_ = torch.manual_seed(0)

# %% [markdown]
# ## Feel the problem
#
# A lawyer dictates, word by word. His clerk knows him and writes a few words ahead. One glance, and the lawyer strikes
# everything from the first word on that he would not have said.
#
# A model dictates too: a token needs the one before it, so every token is one *step*, one run of the whole model.
# But a run may read several tokens at once.
#
# **Guess first:** a toy writes 32 tokens. How many steps does it take with a clerk who writes five tokens ahead?

# %% tags=["nbval-check-output"]
model = ds.example("draft")
prompt = "KING RICHARD:\nNow is the winter of our discontent\nMade glorious summer by "
for speculate in (False, True):
    counts = Speculation()
    ds.generate(model, prompt, max_new_tokens=32, seed=1, speculate=speculate, speculation=counts)
    print(f"drafts {speculate}: 32 tokens, 1 from the prompt and {counts.steps} steps for the others")

# %% [markdown]
# The clerk is called a **drafter**. That of the report, *DSpark*, has three small layers, *draft blocks*. They see what
# the model's own layers computed for the last tokens (the *target features*, from three layers near the end), and
# propose five tokens at once.
#
# The last token that was written is the **anchor**. One run of the model reads anchor and draft, and judges all five.

# %% [markdown]
# ## One equation and one picture
#
# The model has a *chance* $p(x)$ for every token $x$ that may come next. The drafter has one too, $q(x)$, and draws a
# token $x$ from it. Now draw a number $u$ between 0 and 1:
#
# $$x \text{ stands if } u < \min\left(1, \frac{p(x)}{q(x)}\right)$$
#
# If it falls, another token is drawn in its place, the **correction**, from
#
# $$\frac{\max(0,\ p - q)}{\sum_x \max(0,\ p(x) - q(x))}$$

# %% tags=["nbval-check-output"]
words = ["the", "a", "my", "this", "no"]
p = torch.tensor([0.45, 0.25, 0.15, 0.10, 0.05], dtype=torch.float64)
q = torch.tensor([0.20, 0.50, 0.10, 0.10, 0.10], dtype=torch.float64)
ax = plot_overlap(p.tolist(), q.tolist(), names=words, model="made-up chances")
print(f"stands: {torch.minimum(p, q).sum():.2f}")

# %% [markdown]
# Blue and orange are $q$, blue and green are $p$. What is drafted too often (orange) falls just so often that green
# can fill what is missing. Blue and green together: $p$, whoever drafts.
#
# The blue area, $\sum_x \min(p, q)$, is how often a draft stands.
#
# Behind a token that fell, nothing of the draft counts. Where all five stand, the run has already given the chances of
# the sixth: a **bonus** token. So a step writes one to six tokens.

# %% [markdown]
# ## Naive version

# %%
def judge(p, q, drafted, uniforms):
    """How many drafted tokens stand, and the chances of the token behind them. One more row in p than in q."""
    for place, token in enumerate(drafted):
        if uniforms[place] >= min(1, p[place][token] / q[place][token]):
            missing = [max(0, a - b) for a, b in zip(p[place], q[place], strict=True)]
            return place, [chance / sum(missing) for chance in missing]  # correction
    return len(drafted), p[len(drafted)]  # bonus

# %% tags=["nbval-check-output"]
drawn = torch.Generator().manual_seed(0)
for _ in range(300):
    ours = torch.rand(4, 5, generator=drawn, dtype=torch.float64)
    theirs = torch.rand(3, 5, generator=drawn, dtype=torch.float64)
    ours, theirs = ours / ours.sum(-1, keepdim=True), theirs / theirs.sum(-1, keepdim=True)
    drafted = theirs.multinomial(1, generator=drawn)[:, 0]
    uniforms = torch.rand(3, generator=drawn, dtype=torch.float64)
    count, chances = judge(ours.tolist(), theirs.tolist(), drafted.tolist(), uniforms.tolist())
    same, rest = accept(ours, theirs, drafted, uniforms)
    assert count == same and torch.allclose(torch.tensor(chances).double(), rest / rest.sum())
print("300 drafts of three tokens: the library judges alike")

# %% [markdown]
# ## Does it lose nothing?
#
# We draw a token 100,000 times by way of drafts and count. The **chi-square** number adds up how far counts are from
# what $p$ expects. If the rule is right, chance alone leads to more than 13.28 once in a hundred experiments.
#
# Beside it a common mistake: the ratio upside down, $q/p$.

# %%
def written(p, q, ratio, n=100_000):
    """Counts of the tokens that n drafts of one token lead to."""
    drawn = torch.Generator().manual_seed(1)
    tokens = q.multinomial(n, replacement=True, generator=drawn)
    stands = torch.rand(n, generator=drawn, dtype=torch.float64) < ratio[tokens]
    missing = (p - q).clamp(min=0)
    if not stands.all():
        corrections = missing.multinomial(n, replacement=True, generator=drawn)
        tokens = torch.where(stands, tokens, corrections)
    return tokens.bincount(minlength=len(p))

# %% tags=["nbval-check-output"]
counts = {"p/q": written(p, q, p / q), "q/p": written(p, q, q / p), "q/p, q = p": written(p, p, p / p)}
print("chances p  ", [round(chance, 3) for chance in p.tolist()])
for name, found in counts.items():
    print(f"{name:11}", [round(share, 3) for share in (found / found.sum()).tolist()],
          f"chi-square {chi_square(found, p):,.1f}")
assert chi_square(counts["p/q"], p) < 13.28 and chi_square(counts["q/p"], p) > 1000
assert chi_square(counts["q/p, q = p"], p) < 13.28

# %% [markdown]
# The right rule is the model's own chances. The swapped one writes another text. And the last line is a warning: with
# a *perfect* drafter the mistake cannot be seen. A test of this rule needs a bad drafter.

# %% [markdown]
# ## Train a drafter
#
# The backbone, all that is not drafter, stays frozen. Blocks begin at random anchors of a text. What is learned:
#
# $$0.1\,\text{CE} + 0.9\,\text{TV} + \text{BCE}, \qquad \text{TV} = \tfrac12 \sum_x |p - q| = 1 - \sum_x \min(p, q)$$
#
# CE is the usual loss on the next token. TV is just the share that falls, so the drafter trains what it is judged
# by. BCE teaches a **confidence** $c_k$: the chance that token $k$ stands, if those before it do.

# %%
STEPS = 25
pupil = ds.example("text")
pupil.add_draft(seed=0)
before = {name: value.clone() for name, value in pupil.state_dict().items() if not name.startswith("mtp.")}
plays = Corpus.from_texts(pupil.tokenizer, documents("plays"))
history = train_draft(pupil, plays, steps=STEPS, batch_size=2, length=64, anchors=32, learning_rate=1e-2, warmup=5,
                      progress=False)  # fmt: skip
assert all(torch.equal(value, pupil.state_dict()[name]) for name, value in before.items())
parts = zip(history.losses, history.ce, history.tv, history.confidence, strict=True)
assert all(abs(0.1 * ce + 0.9 * tv + bce - loss) < 1e-4 for loss, ce, tv, bce in parts)

# %%
def smooth(values, n=5):
    """Means of n steps."""
    return {step: sum(values[step : step + n]) / n for step in range(0, len(values) - n + 1, n)}


ax = plot_curves({f"place {k + 1}": smooth([step[k] for step in history.acceptance]) for k in (0, 1, 4)},
                 xlabel="step", ylabel="acceptance, share of 1", model="a drafter in training")  # fmt: skip
first, last = (sum(step[0] for step in part) / 5 for part in (history.acceptance[:5], history.acceptance[-5:]))
print(f"place 1: {first:.2f} before, {last:.2f} after {STEPS} steps")
assert last > first + 0.1

# %% [markdown]
# Acceptance at each place, given that all before it stand. It rises, first at place 1, whose slot holds the
# anchor. The other slots hold a *noise* token that means nothing.
#
# Places 2 and 5 are nearly alike: all slots look at the same features. (Measured along the text, as if all earlier
# tokens stood.)
#
# What the plot does not show: where it ends. The shipped drafter was trained for longer, and its places are nearly
# equal, as we shall see. From here on we take that one.

# %% [markdown]
# ## What is a good draft? Guess before running
#
# We let the toy write at *temperature* 1, so tokens are drawn from $p$ as it is. The drafter has its $q$. Two ways to
# propose:
#
# - **draw** a token from $q$, like a roll of dice;
# - **name** the token that $q$ holds for the likeliest.
#
# Both are judged by the rule above (a named token has $q = 1$). Both lose nothing. **Guess first:** which of them is
# accepted more often, and by how much?

# %%
class Naming:
    """A drafter that proposes the likeliest tokens, at whatever temperature the text is drawn."""

    def __init__(self, model):
        self.inner = dspark_drafter.DSparkDrafter(model)
        self.depth = self.inner.depth

    def propose(self, session, anchors, depth, sampling, generators):
        return self.inner.propose(session, anchors, depth, Sampling(0), generators)

# %%
held_out = Corpus.from_texts(model.tokenizer, documents("plays", "held_out")).batch(0, 4, 64, 0).ids[:, :-1]


def tokens_per_step(drafter, temperature, n=20):
    """What four texts of n tokens show; acceptance here counts only tokens whose forerunners stood."""
    counts = Speculation()
    generate_ids(model, held_out, max_new_tokens=n, temperature=temperature, speculate=drafter, speculation=counts)
    return counts

# %%
dspark = dspark_drafter.DSparkDrafter(model)
drawing, naming = tokens_per_step(dspark, 1.0), tokens_per_step(Naming(model), 1.0)
for name, found in (("drawn", drawing), ("named", naming)):
    print(f"{name}: first token stands {found.acceptance[0]:.2f}, tokens per step {found.accepted_length:.2f}")
assert drawing.acceptance[0] > 2 * naming.acceptance[0] and drawing.accepted_length > naming.accepted_length + 0.5

# %% [markdown]
# **The surprise.** The best guess is a bad draft. A named token stands with chance $p(x)$: as often as the model
# happens to draw just that one. A drawn token stands with $\sum_x \min(p, q)$.
#
# A drafter with $q = p$ that draws is *never* refused, though its token is rarely the one that the model would have
# drawn by itself. It need not guess the next roll of the dice; it has to roll the *same dice*.

# %% [markdown]
# ## Turn the knob: temperature
#
# A temperature below 1 makes chances pointed; at 0 the likeliest token is always taken. Then to draft is to guess.
#
# A second drafter for comparison: it has no weights and repeats what followed the last time the latest tokens stood in
# the text (*n-grams*, lesson 10). **Guess first:** at which temperature is each of them best?

# %%
found = {"n-grams": {t: tokens_per_step(ngram_drafter.NGramDrafter(), t).accepted_length for t in (0, 1)},
         "DSpark": {t: tokens_per_step(dspark, t).accepted_length for t in (0, 0.5)}}  # fmt: skip
found["DSpark"][1] = drawing.accepted_length
ax = plot_curves(found, xlabel="temperature", ylabel="tokens per step", model="the text toy")
print({name: {t: round(length, 2) for t, length in curve.items()} for name, curve in found.items()})
assert found["DSpark"][1] > found["n-grams"][1] + 0.5

# %% [markdown]
# Many think that drafts do best at 0, where text is most predictable. For this drafter it is the other way round: it
# learned to have the model's chances, not to find their peak. Text at 0 repeats itself (look at the one further down),
# which suits the n-grams a little; drawn text does not, and they are nearly useless.
#
# What the plot does not show: other models. One whose $p$ is pointed everywhere has little to gain from dice.

# %% [markdown]
# ## One step under the glass
#
# The same text as at the start, one step. In a live notebook the cell behind it steps through.

# %%
steps = draft_steps(model, prompt, max_new_tokens=32, seed=1)
chosen = next(number for number, step in enumerate(steps, 1) if 1 <= step.accepted < 4)
print(draft_view(model, steps, chosen))

# %%
# NBVAL_IGNORE_OUTPUT
explore_draft(model, prompt, max_new_tokens=32, seed=1)

# %% [markdown]
# The lower table is what the session holds. The run has read anchor and draft, so rows of tokens that fell are in the
# stores: in windows, in global entries, in index keys, in unfinished groups. All of that is taken back, exactly.

# %% [markdown]
# ## Does it leave a trace?
#
# At temperature 0 there is only one right text. We write it with and without drafts, in float64, and compare the
# *fingerprint*, a hash of every store.

# %% tags=["nbval-check-output"]
exact = copy.deepcopy(model).double()
sessions = {speculate: ds.Session(exact) for speculate in (False, True)}
texts = {}
for speculate, session in sessions.items():
    texts[speculate] = ds.generate(session, prompt, max_new_tokens=24, temperature=0, speculate=speculate)
print(texts[True])
print("same text", texts[True] == texts[False], "- same stores",
      sessions[True].fingerprint() == sessions[False].fingerprint())
assert texts[True] == texts[False] and sessions[True].fingerprint() == sessions[False].fingerprint()

# %% [markdown]
# > **Correction.** Popular accounts say that DSpark *emits* several tokens at once. It emits none: it proposes, and
# > every token that is written has been judged by the whole model. Nor does a weak drafter make a text worse. It makes
# > it slower.

# %% [markdown]
# ## Take it away
#
# Two sources tell the drafter what comes. The *target features*: what the model's layers know of the text. And the
# **Markov head**: all five slots are computed side by side, so slot 2 cannot know which token was drawn at slot 1. A
# small table adds a bias to its logits: which token often follows which.
#
# **Guess first:** we switch off one of them. Which loss is worse: the drafter blind for the text, or without its table
# of pairs?

# %%
def acceptance(drafter, where="plays", n=256):
    """Behind n anchors of a held-out text: the drafter's losses, and its acceptance at each place."""
    batch = Corpus.from_texts(model.tokenizer, documents(where, "held_out")).batch(0, 8, 128, 0)
    with torch.no_grad():
        return draft_step(drafter, batch, n, torch.Generator().manual_seed(0)).loss

# %%
blind, no_pairs = copy.deepcopy(model), copy.deepcopy(model)
with torch.no_grad():
    blind.mtp[0].main_proj.weight.zero_()
    no_pairs.mtp.last.markov_head.head.weight.zero_()
by_part = {name: acceptance(one) for name, one in (("whole", model), ("blind", blind), ("no pairs", no_pairs))}
for name, loss in by_part.items():
    print(f"{name:9} tokens per step {loss.accepted_length:.2f}; by place",
          " ".join(f"{share:.2f}" for share in loss.acceptance.mean(0).tolist()))
assert by_part["whole"].accepted_length > by_part["no pairs"].accepted_length + 0.3

# %% [markdown]
# **It hurts, and not where most expect it.** Here the table of pairs is worth more than all features. Our toy is a
# weak model of a small vocabulary: much of what it knows are pairs. A large model knows more of the text, and there
# features should count for more; that we cannot show.
#
# (Both parts were trained together. A drafter that never had one would have learned to make do.)

# %% [markdown]
# ## How deep? Costs against gains
#
# A deeper draft gains less with each token: token $k$ counts only if all before it stand. And it costs: the draft
# itself, and a longer run. Blue below the dashed line would mean that drafts cost more than they bring. (Processor
# time of your machine: this cell differs from run to run.)

# %%
# NBVAL_IGNORE_OUTPUT
gains = dict(enumerate(itertools.accumulate(drawing.acceptance, initial=1.0)))
costs = cost_ratios(model, rounds=5)
ax = plot_curves({"cost of a step": costs, "tokens per step": gains}, xlabel="drafted tokens", model="the text toy",
                 ylabel="cost and gain, in plain steps")  # fmt: skip
print("speed:", {depth: round(gains[depth] / costs[depth], 2) for depth in gains})

# %% [markdown]
# Speed is blue over dashed; where they meet is the *break-even*. A draft of one token hardly pays: the whole
# block is computed whatever the depth, and our toy's drafter has three layers where the model has eight. In a large
# model it is a far smaller part.

# %% [markdown]
# ## Can the drafter's confidence be believed?
#
# The confidence $c_k$ holds if all tokens before $k$ stand. The chance that a draft stands *up to and with* token $k$
# is its **survival**, $a_k = c_1 c_2 \cdots c_k$.

# %% [markdown]
# *Calibrated* means: of all drafts with a survival of 0.7, seven in ten get that far. If not, each $c_k$ is bent by a
# number $\tau_k$, fitted on other text: $\sigma(\text{logit}/\tau_k)$, where $\sigma$ is the sigmoid. (That number is
# called a temperature, too.)
#
# **Guess first:** training judged the drafter at temperature 1. Is its confidence right there? And at 0?

# %%
def record(where, temperature):
    """Drafts along a held-out text, judged by the model."""
    rows = Corpus.from_texts(model.tokenizer, documents(where, "held_out")).batch(0, 8, 120, 0).ids
    return record_drafts(model, rows, start=40, every=6, sampling=Sampling(temperature))


def blocks(drafts):
    """Confidence logits, and the chances min(1, p/q) of the tokens."""
    return calibrate.Blocks(drafts.logits.numpy(), drafts.chances.numpy())


drawn_drafts = record("jargon", 1.0)
warm, cold, other = blocks(drawn_drafts), blocks(record("jargon", 0)), blocks(record("plays", 0))

# %%
fitted = calibrate.fit_temperatures(other)
bins = {"at 1, as trained": calibrate.pooled_reliability(warm, ()),
        "at 0, as trained": calibrate.pooled_reliability(cold, ()),
        "at 0, fitted on plays": calibrate.pooled_reliability(cold, fitted)}  # fmt: skip
ax = plot_reliability(bins, model="jargon, never fitted on")
error = {name: calibrate.calibration_error(part) for name, part in bins.items()}
shipped = calibrate.calibration_error(calibrate.pooled_reliability(warm, model.config.dspark_temperatures))
print("errors:", {name: round(value, 3) for name, value in error.items()}, f"at 1, shipped temperatures {shipped:.3f}")
assert error["at 0, as trained"] > 3 * error["at 1, as trained"]
assert error["at 0, fitted on plays"] < 0.7 * error["at 0, as trained"]

# %% [markdown]
# **A hit and a miss.** At 1 the confidence is right as it is, for BCE taught it just that; the fitted numbers that the
# shipped drafter has do not help much. At 0 it believes far too much, and numbers fitted on *plays* help on *jargon*.
# They do not make it right: to divide a logit cannot turn "likely" into "unlikely".

# %%
c_k = calibrate.confidences(warm.logits, ()).ravel()
alone = calibrate.calibration_error(calibrate.reliability(c_k, warm.survived.ravel()))
print(f"error at 1 of survivals {error['at 1, as trained']:.3f}, of c_k taken for survival {alone:.3f}")
assert alone > 3 * error["at 1, as trained"]

# %% [markdown]
# And what the number means matters more than any fit. Whoever takes $c_k$ itself for the chance that the draft gets as
# far as $k$ believes in tokens that are hardly ever reached.

# %% [markdown]
# ## How deep, for many readers at once?
#
# A server runs many requests in one step. DSpark's *scheduler* looks at all their drafts and admits token after token,
# those of the greatest survival first, as long as
#
# $$(R + \textstyle\sum a) \times \text{steps per second}$$
#
# rises: $R$ requests, each with one sure token, and the survivals admitted. It stops at the first fall. So whether
# token $k$ is judged never depends on what comes behind it; else the rule would no longer be lossless.

# %% [markdown]
# How long does a step take? We take the weights of `flash` and a machine that does nothing but read them, each once
# per step. `flash` has 384 experts in a layer, a token visits 6, and we let tokens choose evenly and not alike.
#
# Popular accounts say that judging is free where a machine waits for memory: the weights are read anyway. **Guess
# first:** how many times the bytes of one token does a step of six read?

# %% tags=["nbval-check-output"]
flash = ds.Config.preset("flash")
assert (flash.n_routed_experts, flash.num_experts_per_tok) == (384, 6)
weights = WeightBytes(flash)
one = weights.step(1)
print(f"one token {one / 1e9:.1f} GB, a draft {weights.draft() / 1e9:.1f} GB")
for requests in (1, 16, 64, 256):
    plain = weights.step(requests)
    times = [weights.step(requests * (depth + 1)) / plain for depth in (0, 1, 3, 5)]
    print(f"{requests:3} requests: with 0, 1, 3, 5 drafted tokens each", " ".join(f"{x:.2f}" for x in times))
assert weights.step(6) > 2 * one

# %% [markdown]
# > **Correction.** With experts judging is not free, not even for a single reader: each token wants experts of its
# > own. A step of six, with its draft, must write more than that many tokens to pay.
#
# (Reckoned, not measured: neighbouring tokens may share experts, which makes it cheaper.)
#
# **Guess first:** the more requests, the busier the machine. Does the scheduler draft shorter and shorter as the load
# grows? We replay the drafts of our toy on `flash`'s curve.

# %%
n_tokens, loads = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536), (1, 4, 16, 64, 256)
reading = StepCurve(n_tokens, tuple(weights.step(n) / 1e9 for n in n_tokens))  # a GB is our unit of time
drafting = StepCurve(loads, tuple(weights.draft(n) / 1e9 for n in loads))
confidence = calibrate.confidences(warm.logits, model.config.dspark_temperatures)
rows = simulate(confidence, drawn_drafts.accepted, reading, loads=loads, drafting=drafting, blocks=4096)
ax = plot_schedule(rows, model="our drafts, flash's bytes", relative=True)

# %%
lengths = {row.requests: row.verified for row in rows if row.kind == "scheduler"}
gain = over_best_fixed(rows)
for load in loads:
    print(f"{load:3} requests: {lengths[load]:.2f} drafted tokens judged per request,"
          f" {gain[load]:.2f} of the best fixed length")
assert lengths[16] < lengths[1] < 3 < lengths[256] and best_fixed(rows)[16].setting == 0 and min(gain.values()) > 0.9

# %% [markdown]
# **Another surprise.** Shorter at first, then long again! With some requests each new token brings new experts; from
# 64 on nearly all experts are read anyway, and more tokens hardly cost anything, until the machine has too much to
# *compute*, which this curve leaves out.
#
# In the middle nothing pays. But the rule sees confidences, so drafts are made and paid for before it decides. Our
# scheduler therefore also decides *beforehand*, from what earlier drafts brought, whether to draft at all.

# %% [markdown]
# ## What it costs
#
# Draft blocks have windows of their own, with rows made from target features. They hold the last $W$ tokens and no
# more: nothing grows with the text, and nothing enters the candidate pool (lesson 05).

# %% tags=["nbval-check-output"]
held = sessions[True].report()
mine = [store for store in held.stores if store.name.startswith("mtp.")]
print(f"toy: the drafter holds {len(mine)} windows of {mine[0].rows} rows, {held.bytes('draft_window'):,} bytes,"
      f" behind {held.tokens} tokens")  # fmt: skip
row = WINDOW.row_bytes(flash.head_dim)
windows = flash.num_nextn_predict_layers * flash.sliding_window * row
print(f"flash: {flash.num_nextn_predict_layers} x {flash.sliding_window} rows of {row} bytes: {windows:,}")
assert windows == 202_752 and {store.kind for store in mine} == {"draft_window"}

# %% tags=["nbval-check-output"]
counted = parameters.count_parameters(flash, draft=True)
tokens = float(windows / kv_bytes.kv_bytes(flash).bytes_per_token)
print(f"flash: draft blocks {counted.draft_blocks / 1e9:.2f}B weights of {counted.total / 1e9:.1f}B;")
print(f"their windows are worth {tokens:.0f} tokens of the growing cache")
print(f"a draft reads {weights.draft() / one:.2f} times what a plain step reads")

# %% [markdown]
# ## What a toy cannot show
#
# How far features carry in a model that understands its text; how pointed its chances are; the accepted length of
# `flash`, and so how much faster it writes. What holds at any size: the rule, its proof by counting, exact rollback,
# the bytes of windows, the arithmetic of costs.

# %% [markdown]
# ## Exercise 1
#
# Write a function of the confidences $c_1, c_2, \dots$ of a draft: how many tokens does its step write, on average, if
# they are calibrated?
#
# <details><summary>Hint</summary>
#
# One token is sure. Token $k$ is written if the draft gets that far.
#
# </details>

# %%
expected_tokens = ...  # such as: lambda confidence: 1.0
check_tokens(expected_tokens)

# %% [markdown]
# ## Exercise 2
#
# Write the correction: from $p$ and $q$, tensors of chances, the chances of the token that takes the place of one that
# fell.
#
# <details><summary>Hint</summary>
#
# The green parts of the picture, and nothing else. Chances add up to 1.
#
# </details>

# %%
correction = ...  # such as: lambda p, q: p
check_correction(correction)

# %% [markdown]
# ## Exercise 3
#
# Every drafted token stands with the same chance, given those before it. A draft costs `draft` plain steps, of
# whatever depth; `steps[n]` is the cost of a run that judges $n$ tokens, from 0 on. Write a function of acceptance,
# `draft` and `steps`: the depth that writes most per cost. Depth 0 makes no draft.
#
# <details><summary>Hint</summary>
#
# Exercise 1 with equal confidences, divided by what it costs, for each depth.
#
# </details>

# %%
best_depth = ...  # such as: lambda acceptance, draft, steps: 0
check_depth(best_depth)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
def on_average(confidence):
    return 1 + sum(itertools.accumulate(confidence, lambda a, c: a * c))


def missing_part(p, q):
    rest = (p - q).clamp(min=0)
    return rest / rest.sum()


def most_per_cost(acceptance, draft, steps):
    speed = [on_average([acceptance] * n) / (cost + draft * (n > 0)) for n, cost in enumerate(steps)]
    return speed.index(max(speed))


check_tokens(on_average)
check_correction(missing_part)
check_depth(most_per_cost)
assert refuses(check_tokens, lambda c: 1 + sum(c)) and refuses(check_correction, lambda p, q: p)
assert refuses(check_depth, lambda acceptance, draft, steps: 5)

# %% [markdown]
# ## Recap
#
# - A drafted token stands with chance $\min(1, p/q)$; a correction fills what is missing. No chance changes, and no
#   store keeps a trace.
# - To name the likeliest token is a bad draft of drawn text; to roll the same dice is a good one.
# - Tokens per step are $1 + a_1 + a_2 + \dots$, with survivals, not confidences. Drafts pay where that exceeds the
#   cost of the step.
# - With experts, more tokens read more weights, until all are read.

# %% [markdown]
# [Technical report](https://arxiv.org/abs/2609.19969): §2.4.3. Before it: **lesson 10**, Engram's tables. Next:
# **lesson 12**, optimisers by role.

# %% [markdown]
# ## 中文小结
#
# 1. 草稿词元以 min(1, p/q) 的概率留下，否则从 max(0, p − q) 重抽：文本的分布与逐个解码完全一样。
# 2. 温度为 1 时，按 q 掷骰子远胜于报出最可能的词元：要同样的骰子，不必猜中点数。
# 3. 被拒的词元在所有缓存里不留痕迹：float64 下指纹与从未起草时相同。
# 4. 每步词元数是 1 加各位存活率之和；存活率是置信度的连乘。
# 5. 多验一个词元要多读专家的权重；请求很多时专家反正全读，草稿又变长。
