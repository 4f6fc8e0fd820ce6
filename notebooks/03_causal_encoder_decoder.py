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
# # Why does a prompt need only half the layers?
#
# **Lesson 03, the causal encoder-decoder.** 30 minutes to read, about a minute to run on one CPU thread, no GPU.
#
# Afterwards you can
# 1. derive on how many of a prompt's tokens the upper layers must run, and test it to the last bit;
# 2. say what is lost when they run on fewer, and when the loss ends;
# 3. count what a prompt costs, and what may not be skipped.

# %%
from dataclasses import replace

import torch

import tinyds41 as ds
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.prefill import decoder_tokens as in_decoder
from tinyds41.cost.prefill import prefill_cost
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_03 import check_later_split, check_mended, check_trapezoid
from tinyds41.infer.session import decoder_tokens
from tinyds41.show.distance_plots import plot_by_distance
from tinyds41.show.flow_plot import plot_data_flow
from tinyds41.show.run_plots import plot_curves
from tinyds41.train.corpus import Corpus, documents
from tinyds41.train.note import Note, known_by_distance
from tinyds41.train.tasks import needle_config

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run
_ = torch.manual_seed(0)

# %% [markdown]
# ## Feel the problem
#
# Before it answers, a model reads the prompt: *prefill*. Usually every layer runs on every token. But only the last
# token is asked what comes next.
#
# Think of two colleagues. One reads the file and writes index cards. The other replies, from the cards. Must he, too,
# go through every page?

# %% [markdown]
# `flash`, the released model, has $L = 40$ layers. A layer that runs on a token is one *layer-token*.
#
# **Guess first:** which part of $40 \cdot 4096$ layer-tokens does it run for a prompt of 4,096 tokens? A tenth, half,
# all of them?

# %% tags=["nbval-check-output"]
flash = ds.Config.preset("flash")
plan, cost = flash.plan(), prefill_cost(flash, "flash")
print(f"encoder: layers 0 to {plan.boundary - 1}, decoder: {plan.boundary} to {len(plan) - 1}")
shares = {}
for tokens in (128, 2**12, 2**14, 2**17, 2**20):
    for mode in ("bounded", "exact"):
        n = min(tokens, decoder_tokens(flash, mode))
        shares[tokens, mode] = (plan.n_encoder * tokens + plan.n_decoder * n) / (len(plan) * tokens)
    print(f"{tokens:>9,} tokens: bounded {shares[tokens, 'bounded']:.3f}, exact {shares[tokens, 'exact']:.3f}")
assert all(shares[4096, mode] == cost.at(4096, mode).layer_token_share for mode in ("bounded", "exact"))
assert round(shares[4096, "bounded"], 3) == 0.516 and round(shares[2**20, "exact"], 2) == 0.50

# %% [markdown]
# About half, for long prompts. *Exact* and *bounded* are two answers to the question how many tokens the upper half
# needs. We derive the first, and measure what the second loses.
#
# ## One picture
#
# A prompt, then one new token. The lower half, the **encoder**, runs on all tokens. The upper half, the **decoder**,
# runs on the last ones. In *decode*, the phase in which new tokens are made, all layers run: the decoder is a part of
# the model, decode a phase.

# %%
tokens = 2**14
ax = plot_data_flow(plan, model="flash", tokens=tokens, in_decoder=in_decoder(flash, tokens, "exact"), mode="exact")

# %% [markdown]
# What makes the white area possible? A layer looks at other tokens in two ways only:
#
# - at its **window**, the last $W$ tokens, of which it keeps a row each (lesson 02);
# - at **entries**, rows that stand for far tokens (lesson 04).
#
# In the decoder, all entries are written by its first layer, the *boundary* layer (20 in `flash`), from what the
# *encoder* made of a token. So the past is there for all decoder layers, although they never ran on it. Only windows
# must be filled.

# %% [markdown]
# ## One equation
#
# Walk back from the end. The last layer's output is wanted for one token, the last. It needs rows of $W$ tokens, so the
# layer below must be right for $W$ tokens; these need rows $W - 1$ further back; and so on. With $n_{dec}$ decoder
# layers,
#
# $$n = 1 + n_{dec}\,(W - 1) = W + (n_{dec} - 1)(W - 1)$$
#
# ## Naive version

# %% tags=["nbval-check-output"]
def needed(config):
    """Of how many last tokens each decoder layer needs rows: walk back from the last token's output."""
    plan, tokens, counts = config.plan(), 1, {}
    for layer in reversed(plan[plan.n_encoder :]):
        tokens += config.sliding_window - 1
        counts[layer.layer] = tokens
    return counts


for name in ds.preset_names():
    config = ds.Config.preset(name)
    n = max(needed(config).values())
    print(f"{name:6} W {config.sliding_window:3}, {config.plan().n_decoder:2} decoder layers: n = {n:,}")
    assert n == decoder_tokens(config, "exact")
assert n == 2541 and decoder_tokens(flash, "bounded") == flash.sliding_window

# %% [markdown]
# Now prefill itself, from the library's parts. First the encoder, on all tokens; `model.encode` ends with the boundary
# layer's entries.

# %%
@torch.no_grad()
def encode(model, prompt):
    """The cache after the encoder, and what the decoder will start from."""
    cache = ds.Cache(model.config, batch=len(prompt), dtype=model.dtype)
    carry = model.encode(prompt, cache.tokens(prompt.shape[1]))  # what layers see of the cache and these new tokens
    cache.advance(prompt)  # they are read
    return cache, carry

# %% [markdown]
# Then the decoder, on the last `n` tokens, whatever `n` is: its windows begin there, in a *segment* of the text.

# %%
@torch.no_grad()
def decode(model, encoded, n):
    """The decoder on the last n tokens: the logits of the last one, and the cache."""
    cache, carry = encoded[0].fork(), encoded[1]  # a copy, so that we can try another n
    return model.logits(model.decode(carry.last(n), cache.segment(n, cache.lengths)).last(1)), cache

# %% [markdown]
# And what comes behind a prompt: more tokens, on which all layers run.

# %%
@torch.no_grad()
def read_on(model, cache, ids):
    """More tokens, through all layers: their logits."""
    ctx = cache.tokens(ids.shape[1])
    logits = model.logits(model.decode(model.encode(ids, ctx), ctx))
    cache.advance(ids)
    return logits

# %% [markdown]
# Is that what the library does? We take the trained toy that comes with it: eight layers, half of them decoder, windows
# of 32, so $n$ is 125. It reads four excerpts of plays.
#
# We compute in float64. In float32, sums over another number of tokens differ enough to tip a rounding in the cache now
# and then.

# %%
model = ds.example("text").double()
corpus = Corpus.from_texts(model.tokenizer, documents("plays", "held_out"))
prompts, behind = next(iter(corpus.in_order(4, 384))).ids[:, :384].split([256, 128], 1)
encoded = encode(model, prompts)
for mode, n in (("exact", 125), ("bounded", 32), ("full", 256)):
    session = ds.Session(model)
    theirs, (mine, cache) = session.prefill(prompts, mode=mode), decode(model, encoded, n)
    assert torch.allclose(theirs, mine[:, 0], atol=1e-12) and session.fingerprint() == cache.fingerprint()
    assert n == (decoder_tokens(model.config, mode) or prompts.shape[1])  # of "full" it knows no number
print(f"{len(prompts)} prompts of {prompts.shape[1]} tokens: same logits, same fingerprint")

# %% [markdown]
# The same logits, and the same *fingerprint*: a hash of all rows in the cache that later tokens can read.
#
# ## Who really ran?
#
# The library counts while it runs. `tokens_run` is a layer's tokens; `boundary_projections` counts tokens of which the
# boundary layer made an entry.

# %% tags=["nbval-check-output"]
for mode in ("full", "exact", "bounded"):
    session = ds.Session(model)
    session.prefill(prompts[0], mode=mode)
    ran, written = session.counters.tokens_run, session.counters.boundary_projections
    print(f"{mode:8} encoder {ran[3]}, decoder {ran[4]} to {ran[7]} tokens; entries at the boundary {written[4]}")
    assert written == {4: 256} and ran[0] == ran[3] == 256
session.decode(prompts[0, -1])
print("decode   all layers:", set(session.counters.tokens_run.values()))

# %% [markdown]
# > **Correction.** Popular accounts say that in prefill the decoder is mostly off. It runs in full on the last tokens,
# and for *every* token the boundary layer projects the encoder's output to an entry and its index key. What happens
# without these, we shall see.

# %% [markdown]
# ## Guess before running
#
# 256 tokens were read, and the decoder saw 125 of them. **Guess first:** how much do the logits differ from those of
# `full`, where every layer saw everything: in the second digit, the fifth, the last? And the rows of the cache? And
# with 124, one too few?

# %%
logits, full = decode(model, encoded, 256)
for n in (125, 124, 120, 112, 96, 64, 32):
    found, cache = decode(model, encoded, n)
    same = cache.fingerprint() == full.fingerprint()
    print(f"decoder on {n:3}: a logit changes by {(found - logits).abs().max():.0e}; cache the same bits: {same}")
    if n >= 124:
        assert same and (found - logits).abs().max() < 1e-11
assert not same and (found - logits).abs().max() > 1e-4

# %% [markdown]
# With $n$ tokens, the cache is the same, bit by bit. In the logits only the last digits of float64 differ.
#
# **A miss.** If $n$ is needed, one token fewer should break it. It does not! A suspect: rows are rounded to 8 bits when
# they are stored, and what comes through a chain of four windows may be too small to survive that.
#
# So we switch rounding off.

# %%
def whole(model, encoded, n, ids):
    """Logits of the prompt's last token and of the tokens behind it."""
    logits, cache = decode(model, encoded, n)
    return torch.cat([logits, read_on(model, cache, ids)], 1)


NOISE = 1e-13  # float64 sums over another number of tokens differ by less
smooth = ds.variant(model, quantize_cache=False)
begun = encode(smooth, prompts)
full = whole(smooth, begun, 256, behind)

# %%
lost = {n: (whole(smooth, begun, n, behind) - full).abs().amax((0, 2)).tolist() for n in (125, 124, 123, 122, 32, 1)}
for n in (125, 124, 123, 122):
    print(f"decoder on {n}: last prompt token " + ", then ".join(f"{error:.0e}" for error in lost[n][:4]))
assert max(lost[125]) < NOISE < lost[124][0] and max(lost[124][1:]) < NOISE < lost[123][1]

# %% [markdown]
# Now one token fewer does change the last prompt token, by next to nothing. And *only* that one: later tokens reach one
# position less far back. With two fewer, the next token changes as well.
#
# ## The surprise
#
# `bounded` runs the decoder on one window of tokens, 32 here. Its windows are wrong; new tokens read them, and their
# own rows are read in turn.
#
# **Guess first:** draw its error over the next 128 tokens, on a log axis. Does it grow, stay, or fade?

# %%
curves = {f"decoder on {n}": {k: error for k, error in enumerate(lost[n]) if error > NOISE} for n in (32, 1)}
ends = {name: max(curve) for name, curve in curves.items()}
ax = plot_by_distance(
    curves, borders=ends, log=True, title="Change of logits against full prefill, no rounding",
    ylabel="largest change of a logit", xlabel="tokens after the end of the prompt")  # fmt: skip
print({name: f"last change at token {end}" for name, end in ends.items()})
assert ends == {"decoder on 32": 124 - 32, "decoder on 1": 124 - 1}

# %% [markdown]
# It ends. After 92 tokens every later logit is that of `full`. (Left out, here and below: all less than `NOISE`.)
#
# The encoder was never wrong, so neither were the entries. Only windows were, and a window forgets. What is wrong moves
# up one layer and at most $W - 1$ tokens on. So tokens count alike, before the end of the prompt or behind it: as soon
# as the decoder has run on $n - 1$ of them, all is well.

# %%
_, full = decode(model, encoded, 256)
_, cache = decode(model, encoded, 32)
done = 0
for k in (0, 32, 60, 92):
    if k > done:
        for one in (full, cache):
            read_on(model, one, behind[:, done:k])
    done, same = k, cache.fingerprint() == full.fingerprint()
    print(f"bounded, {k:2} tokens later: cache the same bits as full's: {same}")
    assert same if k == 92 else not same or k == 60
window = flash.sliding_window
print(f"flash: {plan.n_decoder} layers * {window - 1} - {window} = {plan.n_decoder * (window - 1) - window} tokens")

# %% [markdown]
# With rounding, too: 92 tokens later the caches are equal, bit by bit. (Here the *same* text is read on. A model that
# writes by itself may choose another word before that, and then texts differ for good.)
#
# For `flash` the number is 2,412 tokens.

# %% [markdown]
# ## The knob
#
# How large is the loss until then, in terms of predictions? The *KL divergence* of prediction $q$ from $p$ is the mean
# of $\ln(p/q)$ over tokens drawn from $p$: 0 where they are equal, in nats, as the loss. A *favourite* is the
# likeliest token.
#
# We turn $n$, the number of tokens on which the decoder ran. **Guess first:** with a single one, how many of a hundred
# favourites change?

# %%
soon = behind[:, :32]
p = whole(model, encoded, 256, soon).log_softmax(-1)


def compare(n):
    """KL divergence from full and share of equal favourites, over the prompt's last token and the next 32."""
    q = whole(model, encoded, n, soon).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item(), (p.argmax(-1) == q.argmax(-1)).double().mean().item()

# %%
by_n = {n: compare(n) for n in (1, 2, 4, 8, 16, 32, 48, 64, 96, 125)}
for n in (1, 8, 32, 64, 125):
    print(f"decoder on {n:3}: KL {by_n[n][0]:.1e} nats, same favourite {by_n[n][1]:.3f}")
ax = plot_by_distance(
    {"KL from full": {n: kl for n, (kl, _) in by_n.items() if kl > NOISE}}, log=True, borders={"KL from full": 125},
    title="What the toy's predictions lose", ylabel="KL divergence, nats",
    xlabel="prompt tokens on which the decoder ran")  # fmt: skip
assert by_n[125][0] < NOISE and by_n[32][0] < 1e-5 < 1e-4 < by_n[1][0] < 0.05 and by_n[32][1] == 1 > by_n[1][1] > 0.9

# %% [markdown]
# One window of tokens loses about a millionth of a nat, and no favourite changes. Even with a *single* token nearly all
# stay.
#
# What this does not show: how much a large model keeps in its decoder windows. Our toy has read text for minutes; it
# makes little use of them.

# %% [markdown]
# ## With and without the split
#
# The split has a price: decoder layers write no entries of their own, made from what *they* know. Is that missed?

# %% [markdown]
# Two toys of four layers: 0 and 1 have windows of 4 alone, 2 and 3 attend to all entries as well, one per token.
# *Split*: layer 2 writes for both. *Unsplit*: layer 3 writes its own, from its own input, so layer 2 must run on all
# tokens, too. The task is that of lesson 02: from a *note* on, every token must say it.

# %%
task = Note()
entries = {"compress_ratios": (0, 0, 1, 1), "candidate_source_layer_id": None, "candidate_topk_blocks": 0}
plans = {"split": (2,), "unsplit": (2, 3)}
configs = {
    name: needle_config(task, **entries, sliding_window=4, index_topk=96, kv_source_layer_ids=writers,
                        index_source_layer_ids=writers) for name, writers in plans.items()}  # fmt: skip
toys, losses, known = {}, {}, {}
for name, config in configs.items():
    toys[name] = ds.Model(config, seed=0)
    weights = sum(parameter.numel() for parameter in toys[name].parameters())
    print(f"{name}: {weights:,} weights, {kv_bytes(config).bytes_per_token} bytes per token, runs"
          f" {config.plan().n_encoder / 4:.2f} of the layers on a long prompt")

# %%
for name, toy in toys.items():
    # All entries are attended to, none is chosen: nothing to teach an indexer.
    losses[name] = ds.train(toy, task, steps=42, batch_size=32, length=32, seed=0, learning_rate=6e-3,
                            indexer_weight=0.0).losses  # fmt: skip
    known[name] = known_by_distance(toy, task)
smoothed = {name: {step: sum(each[step - 6 : step]) / 6 for step in range(6, 43, 6)} for name, each in losses.items()}
ax = plot_curves(smoothed, xlabel="step (mean of the last 6)", ylabel="loss, nats per token",
                 model="two toys on notes")  # fmt: skip
for name, curve in known.items():
    print(f"{name}: right at distances 0 to 48 {sum(curve.values()) / 49:.3f}, last loss {smoothed[name][42]:.3f}")
assert min(sum(curve.values()) / 49 for curve in known.values()) > 0.9

# %% [markdown]
# One might expect the unsplit toy to be ahead. It is not: both learn the task. Nor is the split toy better, for with
# other seeds and batch sizes the gap between their losses went either way (`docs/LOG.md`). This task does not miss
# what the split takes away, and the unsplit toy pays twice the bytes.
#
# It is an easy task: it does not show that the split is free. A layer that writes from its own input *could* put more
# into an entry.

# %% [markdown]
# ## Take it away
#
# If the decoder skips most tokens, why not skip the boundary layer's projections as well? Then the decoder has entries
# of those tokens alone on which it ran.
#
# **Guess first:** prompts of 64 tokens, the decoder on the last 4. From how far back does the toy still know the note
# at the end: 3 tokens, a few more, or all?

# %%
@torch.no_grad()
def last_answers(model, n, *, hide=False, length=64, n_texts=6):
    """Share of right answers of a prompt's last token, by distance of the note; hide: skipped tokens have no entry."""
    distance = torch.arange(49).repeat(n_texts)
    texts = torch.randint(task.first_filler, task.vocab_size, (len(distance), length))
    notes = torch.randint(task.first_note, task.first_filler, (len(texts),))
    texts[range(len(texts)), length - 1 - distance] = notes
    cache, carry = encode(model, texts)
    ctx = cache.segment(n, cache.lengths)
    seen = ctx.entries
    if hide:
        ctx.entries = lambda source: replace(seen(source), first=torch.full_like(ctx.positions, length - n))
    right = model.logits(model.decode(carry.last(n), ctx).last(1))[:, 0].argmax(-1) == notes
    return {d: right[distance == d].double().mean().item() for d in range(49)}

# %%
split = toys["split"]
curves = {"full": last_answers(split, 64), "decoder on 4": last_answers(split, 4),
          "on 4, entries of 4": last_answers(split, 4, hide=True),
          "on 7, entries of 7": last_answers(split, 7, hide=True)}  # fmt: skip
borders = {name: n - 1 + 2 * 3 for name, n in (("on 4, entries of 4", 4), ("on 7, entries of 7", 7))}
ax = plot_by_distance(curves, title="Answers of the split toy at the end of a prompt", ylabel="share of right answers",
                      xlabel="distance of the note, tokens", borders=borders, baseline=("chance", 1 / task.n_notes))
for name, curve in curves.items():
    print(f"{name:18}: right at 0 to 9 {sum(curve[d] for d in range(10)) / 10:.2f}, "
          f"at 20 to 48 {sum(curve[d] for d in range(20, 49)) / 29:.2f}")
far = {name: sum(curve[d] for d in range(20, 49)) / 29 for name, curve in curves.items()}
assert list(borders.values()) == [9, 12] and curves["on 4, entries of 4"][4] > 0.5
assert far["decoder on 4"] > 0.9 and far["on 4, entries of 4"] < 0.2 and far["on 7, entries of 7"] < 0.2

# %% [markdown]
# **It hurts.** Without the projections all far notes are lost, and the answers are chance. With them, a decoder that
# ran on 4 of 64 tokens answers as if it had seen all.
#
# Notes a little further back than 3 were still known: the encoder's two windows had handed them on, 3 tokens each, so
# no answer is possible beyond 3 + 6 = 9 (dashed; for the last 7 tokens 12).
#
# So the saving rests on one small thing that is done for every token.

# %% [markdown]
# ## What it costs, and what it saves
#
# Layer-tokens count layers. Now all work on a prompt of `flash`, weighted by precision (4-bit and 8-bit numbers count
# as cheaper, lesson 00), and its parts.
#
# **Guess first:** which part of the work is the boundary layer's projection of every token?

# %% tags=["nbval-check-output"]
for tokens in (2**12, 2**14, 2**17):
    work = {mode: cost.at(tokens, mode, "weighted") for mode in ("full", "exact", "bounded")}
    part = {mode: one.total / work["full"].total for mode, one in work.items()}
    print(f"{tokens:>9,} tokens: exact {part['exact']:.3f}, bounded {part['bounded']:.3f} of full;"
          f" projections {work['bounded'].boundary / work['bounded'].total:.4f} of bounded")
    assert work["bounded"].boundary / work["bounded"].total < 0.01
assert 0.45 < part["bounded"] < 0.55

# %% [markdown]
# The projections are next to nothing. On prompts of a few thousand tokens `exact` saves little in `flash`. The released
# system replays one window, and accepts an error that lasts for 2,412 tokens at most.

# %% tags=["nbval-check-output"]
cache, decoder = kv_bytes(flash), plan.boundary
at_boundary = sum(row.bytes_per_token for row in cache.rows if row.layer == decoder)
print(f"entries and keys that serve all {plan.n_decoder} decoder layers: {at_boundary} of {cache.bytes_per_token} bytes"
      " per token")
pooled = [layer.layer for layer in plan if layer.pooled]
print(f"layer {decoder} forms the pool, layers {pooled} choose inside it; in bounded prefill for"
      f" {flash.sliding_window} tokens")
print(f"layers that run on a new token in decode: {len(plan)} of {len(plan)}")
assert at_boundary == 356 and cache.bytes_per_token == 890 and flash.candidate_source_layer_id == decoder

# %% [markdown]
# Sharing the entries is lesson 04; here it buys the skipping. The candidate pool of lesson 00 is formed anew for each
# token that chooses, so a skipped token needs none. Decode gets no cheaper: there, every layer runs.

# %% [markdown]
# ## Exercise 1
#
# A decoder of `layers` layers with windows of `window` tokens ran on the last `n` tokens of a long prompt. How many
# tokens must be read on until the cache is again that of a full prefill, if nothing is rounded? Write the function.
#
# <details><summary>Hint</summary>
#
# The curves above end at 92 and 123. What would a negative number mean?
#
# </details>

# %%
mended = ...  # such as: lambda window, layers, n: 92
check_mended(mended)

# %% [markdown]
# ## Exercise 2
#
# The library runs every decoder layer on $n$ tokens. `needed` says that upper layers need fewer. How many layer-tokens
# would the decoder run if each layer ran only on those? The prompt is long. Write the function.
#
# <details><summary>Hint</summary>
#
# The sum of what `needed` returns. Without a loop: a rectangle and a triangle.
#
# </details>

# %%
trapezoid = ...  # such as: lambda window, layers: window * layers
check_trapezoid(trapezoid)

# %% [markdown]
# ## Exercise 3
#
# Let the decoder of `flash` begin at layer 30 instead of 20. Change the schedule only: `compress_ratios` (per layer: 0
# a window only, else tokens per entry), `kv_source_layer_ids` (writers), `index_source_layer_ids` (choosers),
# `candidate_source_layer_id` (who forms the pool). Layers 20 to 29 read entries of two tokens, as the encoder layers
# before them; the decoder again has one writer, which forms the pool.
#
# <details><summary>Hint</summary>
#
# `flash.replace(compress_ratios=[0] * 2 + ...)`; the numbers behind layer 39 are of draft blocks. A writer always
# chooses, too.
#
# </details>

# %%
later_split = ...  # such as: flash
check_later_split(later_split)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
later = flash.replace(compress_ratios=[0] * 2 + [2] * 28 + [1] * 10 + [0] * 3, kv_source_layer_ids=(2, 8, 14, 30),
                      index_source_layer_ids=(2, 8, 14, 30, 34, 38), candidate_source_layer_id=30)  # fmt: skip
check_mended(lambda window, layers, n: max(0, layers * (window - 1) - n))
check_trapezoid(lambda window, layers: layers + (window - 1) * layers * (layers + 1) // 2)
check_later_split(later)
assert later.plan().n_encoder / len(later.plan()) == 0.75
assert refuses(check_mended, lambda window, layers, n: layers * (window - 1) - n) and refuses(check_later_split, flash)
assert refuses(check_trapezoid, lambda window, layers: layers * (window + (layers - 1) * (window - 1)))

# %% [markdown]
# ## Recap
#
# - The decoder reads entries made from the encoder's output, for all tokens, and windows. Only windows need it to run
#   on a prompt.
# - $W + (n_{dec} - 1)(W - 1)$ last tokens leave the cache of a full prefill, to the last bit. In our toy, whose rows
#   are rounded to 8 bits, somewhat fewer did.
# - On fewer, the error is small in our toy, and it ends: after $n_{dec}(W - 1) - n$ more tokens.
# - The boundary layer's projections may not be skipped. Without them the decoder has no past.

# %% [markdown]
# [Technical report](https://arxiv.org/abs/2609.19969): §2.2, §3.2.2. Before it: **lesson 02**, the window. Next:
# **lesson 04**, who writes entries and who reads them.

# %% [markdown]
# ## 中文小结
#
# 1. 解码器读两样东西：由编码器输出写成的全局条目（每个词元都有），和各层自己的窗口。
# 2. 提示里只需让解码器跑最后 W+(n_dec-1)(W-1) 个词元，缓存就与完整预填充逐位相同；`flash` 为 2,541。
# 3. 跑得更少是近似，但误差有期限：再读 n_dec(W-1)-n 个词元后，缓存又逐位相同。
# 4. 边界层的投影必须对每个词元都做；省掉它，远处的内容全部丢失。
# 5. 长提示的层·词元数降到约一半；解码阶段仍要跑全部层。
