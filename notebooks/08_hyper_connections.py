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
# # How do four residual streams pass through memory only once?
#
# **Lesson 08, single-pass hyper-connections.** 30 minutes to read, about a minute to run on one CPU thread, no GPU.
#
# Afterwards you can
# 1. compute by hand what a sub-layer reads, and how its output is written back to four streams;
# 2. say which pass over memory the single-pass shift saves, and what it costs;
# 3. measure which of three kinds of coefficients a trained toy needs.

# %%
import copy
import math

import torch

import tinyds41 as ds
from tinyds41.cost.flops import decode_cost
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.mixing_traffic import SCHEDULES, mixing_traffic
from tinyds41.cost.parameters import count_parameters
from tinyds41.cost.rows import scored_entries
from tinyds41.cost.traffic import DecodeTraffic
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_08 import check_balanced, check_inputs, check_moved_bytes
from tinyds41.show.run_plots import plot_curves
from tinyds41.show.stream_observations import MIX_NAMES, stream_mixes
from tinyds41.show.stream_plots import plot_stream_mixes
from tinyds41.sinkhorn import sinkhorn
from tinyds41.train.corpus import Corpus, data_folder, documents

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run
_ = torch.manual_seed(0)

# %% [markdown]
# ## Feel the problem
#
# A model passes a row of $D$ numbers from layer to layer, for each token: the *residual stream*. A *sub-layer*
# (attention, or the experts) reads it, and adds its output. Picture one notepad on which everybody writes.
#
# **Hyper-connections** give each token $N = 4$ notepads. Who reads mixes them; who writes decides how much goes on
# which.

# %% [markdown]
# **Guess first:** in the released `flash`, which part of a token's work is this mixing: a quarter, a hundredth, less?
# And per sub-layer, how many rows of $D$ numbers travel between memory and processor for it?

# %% tags=["nbval-check-output"]
flash = ds.Config.preset("flash")
N, D, sublayers = flash.hc_mult, flash.hidden_size, 2 * flash.num_hidden_layers
coefficient_work = 2 * count_parameters(flash)["hyper-connections"].decode
mixing_work = sublayers * 2 * (N * N + N + N) * D  # new streams from old ones and the output; then what is read
work = coefficient_work + mixing_work
print(f"{sublayers} sub-layers; mixing {work / 1e6:.0f} MFLOP a token,"
      f" {work / decode_cost(flash).at(2**12, 'raw').total:.2%} of the model's work")
assert work < 0.01 * decode_cost(flash).linear

# %% tags=["nbval-check-output"]
for name in SCHEDULES:
    print(f"{name:11} moves {mixing_traffic(name, N):2.0f} rows of {D:,} numbers per sub-layer")
print(f"one plain stream, in one pass: {mixing_traffic('single-pass', 1):.0f}")
assert [mixing_traffic(name, 4) for name in SCHEDULES] == [20, 14, 10]

# %% [markdown]
# (Counted while three plain schedules run on small arrays, in `cost/mixing_traffic.py`: each read and write of a row of
# $D$ numbers is one. *V4 kernels*: step by step, as the model before, V4, is run. *Two-pass*: V4 with steps joined as
# far as they can be. *Single-pass*: V4.1.)

# %% [markdown]
# So four streams cost next to no arithmetic, and much *traffic*. V4's kernels move 20 rows, five times what one plain
# stream needs. V4.1 moves 10, and that is the least: four rows read and four written, one output read, one input for
# the next sub-layer written.
#
# How can half of the traffic go away without fewer streams?

# %% [markdown]
# ## One equation
#
# $X_1 \dots X_N$ are the streams of one token, before a sub-layer $F$. From them a learned matrix makes three kinds of
# **coefficients**, anew for each token: `pre` ($N$ numbers from 0 to 1, for reading), `post` ($N$ numbers from 0 to 2,
# for writing) and `comb` ($N \times N$, from stream $j$ to stream $k$). Then
#
# $$u = \sum_i \text{mix}_i X_i \qquad y = F(\text{norm}(u))$$
# $$X_k \leftarrow \text{post}_k\, y + \sum_j \text{comb}_{jk} X_j$$

# %% [markdown]
# In V4 `mix` is this sub-layer's own `pre`. In V4.1 it is the `pre` of the sub-layer **before**.

# %% [markdown]
# Why does that save a pass? `pre` needs *all* numbers of all streams: a product with every one of them, and their size.
#
# ```
# V4    update X -> coefficients -> |wait| -> u = pre X -> F
# V4.1  update X, coefficients and u = (old pre) X, all while X passes by once -> F
# ```

# %% [markdown]
# Beside the arithmetic units there is a little fast memory; suppose that it has no room for four rows. So V4 fetches
# them again to mix them, once `pre` is known. With the old `pre` the mix is known beforehand. That is the **single-pass
# shift**: what is read is mixed by stale weights.

# %% [markdown]
# ## Naive version
#
# One token, one sub-layer after another. `comb` becomes positive and *doubly normalised*: divide each row by its sum,
# then each column, and again, 20 times in `flash` (*Sinkhorn*). Then the streams are redistributed, not enlarged.
#
# The start: every stream is the token's embedding, its row of numbers before the first layer; `mix` is (1, 0, 0, 0).

# %%
EPS = 1e-6


def balanced(logits, rounds):
    """Rows (from one source) add up to 1, then columns (into one target), so many rounds."""
    comb = logits.softmax(1) + EPS
    for i in range(rounds):
        comb = comb / (comb.sum(1, keepdim=True) + EPS) if i else comb
        comb = comb / (comb.sum(0, keepdim=True) + EPS)
    return comb

# %%
def coefficients(X, hc, rounds):
    """pre, post and comb of one token, from its streams X [N, D]."""
    n = len(X)
    # The learned matrix fn, on all numbers of all streams; then a factor per kind, and a number per coefficient.
    t = hc.fn @ (X / X.square().mean().sqrt()).flatten()
    pre, post, comb = (part * scale + base for part, scale, base in
                       zip(t.split([n, n, n * n]), hc.scale, hc.base.split([n, n, n * n]), strict=True))  # fmt: skip
    return pre.sigmoid() + EPS, 2 * post.sigmoid(), balanced(comb.view(n, n), rounds)

# %%
def single_pass(X, written, rounds):
    """What every sub-layer reads, and last the output head. written: each hyper-connection and its sub-layer's y."""
    mix, read = torch.eye(len(X))[0], []
    for hc, y in written:
        pre, post, comb = coefficients(X, hc, rounds)
        read.append(mix @ X)
        X = torch.outer(post, y) + comb.T @ X
        mix = pre  # for the next one
    return torch.stack([*read, mix @ X])

# %% [markdown]
# Attention and experts are other lessons. We write down what they return in the library's run, and see whether our
# loop gives them the same to read. The toy: three layers, windows only, text of Shakespeare's plays.

# %%
tokenizer = ds.Tokenizer.load(data_folder())
training, held_out = (Corpus.from_texts(tokenizer, documents("plays", part)) for part in ("train", "held_out"))
windows_only = {"compress_ratios": (0, 0, 0), "kv_source_layer_ids": (), "index_source_layer_ids": (),
                "candidate_source_layer_id": None, "num_nextn_predict_layers": 0,
                "engram_layer_ids": (), "engram_num_embeddings": ()}  # fmt: skip
# Little is cheap: three rounds of Sinkhorn; no cache is kept here, so nothing is rounded for it.
toy = ds.Config.preset("toy", num_hidden_layers=3, hidden_size=48, num_attention_heads=2, n_routed_experts=2,
                       moe_intermediate_size=32, quantize_cache=False, initializer_range=0.06, hc_sinkhorn_iters=3,
                       **windows_only)  # fmt: skip
print(f"{toy.hc_mult} streams of {toy.hidden_size}, {2 * toy.num_hidden_layers} sub-layers, mode {toy.mhc_mode}")

# %%
model, reads, writes = ds.Model(toy, seed=0), [], []
# The norm before a sub-layer is given what is read. Hooks write that down, and what the sub-layer returns.
for layer in model.layers:
    for norm, sublayer in ((layer.attn_norm, layer.attn), (layer.ffn_norm, layer.ffn)):
        norm.register_forward_hook(lambda module, given, made: reads.append(given[0][0]))
        sublayer.register_forward_hook(lambda module, given, made: writes.append(made[0]))
_ = model.norm.register_forward_hook(lambda module, given, made: reads.append(given[0][0]))

# %%
hcs = [hc for layer in model.layers for hc in (layer.hc_attn, layer.hc_ffn)]
ids = held_out.ids[:12].long()[None]
with torch.no_grad():
    model(ids)
    for token, row in enumerate(model.embed(ids)[0]):
        written = [(hc, y[token]) for hc, y in zip(hcs, writes, strict=True)]
        mine = single_pass(row.repeat(toy.hc_mult, 1), written, toy.hc_sinkhorn_iters)
        theirs = torch.stack([u[token] for u in reads])
        assert torch.allclose(mine, theirs, atol=1e-5)  # float32 sums of a few dozen products, in another order
print(f"{len(ids[0])} tokens, {len(theirs)} readers each: equal")

# %% [markdown]
# ## Train it, fresh and stale
#
# A layer that reads with weights made for another sub-layer: that sounds like a price to pay.

# %% [markdown]
# **Guess first:** train one toy in each mode, on the same batches. How much lower is the loss of V4's, which always
# reads with the weights of its own: by 0.01, 0.1 or 1 nat? And a toy with *one* stream, which has a `pre` and a
# `post` as well, how much higher is that one's?
#
# As a yardstick each mode is trained a second time, from other first weights and on other batches.

# %%
STEPS = 36
MOST, FEW = {"length": 128, "max_tokens": 2_000}, {"length": 128, "max_tokens": 1_000}


def loss(model, sample=MOST):
    """Held-out loss in nats per token."""
    return ds.evaluate(model, held_out, **sample).loss

# %%
def teach(seed, **changes):
    """A trained toy."""
    model = ds.Model(toy.replace(**changes), tokenizer=tokenizer, seed=seed)
    ds.train(model, training, steps=STEPS, seed=seed, batch_size=8, length=96, learning_rate=1e-2, record_every=0)
    return model

# %%
taught = {"single pass": [teach(seed) for seed in (0, 1)]}

# %%
taught["V4's mode"] = [teach(seed, mhc_mode="multi_pass") for seed in (0, 1)]

# %%
taught["one stream"] = [teach(0, hc_mult=1)]

# %%
losses = {name: [loss(model) for model in models] for name, models in taught.items()}
for name, found in losses.items():
    gaps = [mine - single for mine, single in zip(found, losses["single pass"], strict=False)]
    print(f"{name:12}", ", ".join(f"seed {seed} {found[seed]:.3f} ({gap:+.3f})" for seed, gap in enumerate(gaps)))
    assert max(gaps) < 0.15 and (name == "one stream" or min(gaps) > -0.15)
counts = ds.evaluate(taught["one stream"][0], held_out, train=training, **MOST).unigram_loss
print("in brackets: beside single pass of the same seed")
print(f"knowing only how often each token occurs: {counts:.3f}; knowing nothing: {math.log(toy.vocab_size):.3f}")

# %% [markdown]
# **The surprise.** Stale weights cost nothing that we can see: the modes are about as close to each other as two seeds
# of the same mode. One way to see it: who makes a `pre` learns to make it for the *next* reader.
#
# **A miss.** Nor do four streams help much: the toy with one keeps up. (With another seed it was ahead: `docs/LOG.md`.)
# These runs are short; the toys know little more than how often words occur. Whether streams pay off in larger ones,
# they cannot say.

# %% [markdown]
# ## Read with the wrong weights
#
# So the shift is harmless if a model *grew up* with it. Now take the trained toys and run each in the other's mode. Not
# a weight changes, only who reads with which `pre`.
#
# **Guess first:** does it hurt? Or have neighbouring sub-layers much the same `pre`?

# %%
swapped = []
for name, other in (("single pass", "multi_pass"), ("V4's mode", "single_pass")):
    for seed, model in enumerate(taught[name]):
        swapped.append(loss(ds.variant(model, mhc_mode=other)) - losses[name][seed])
        print(f"trained in {name}, seed {seed}, run as {other}: {swapped[-1]:+.3f} nats")
assert max(swapped) > 0.1 and min(swapped) > -0.05

# %% [markdown]
# It does, though not with every seed alike; compare it with what all of the training gained over counting words. A
# model must be run in the mode it was trained in, and no shape or name of a weight tells which that was.
#
# ## How stale may it be?
#
# A toy with a longer schooling comes with the package: eight layers, trained single-pass. Here are its coefficients,
# means over held-out text.

# %%
model = ds.example("text")
text = held_out.ids[:256].long()[None]
trace = ds.Trace(*MIX_NAMES)
with torch.no_grad():
    model(text, trace=trace)
mixes = stream_mixes(trace, model.config, [0, 3, 5, 7])
ax = plot_stream_mixes(mixes, model="the example", tokens=f"mean over {text.shape[1]} tokens")

# %% [markdown]
# Four rows of a map say where each stream goes (`comb`). Yellow diagonals: mostly it stays where it is. `out` (`post`):
# some streams get the output, some nearly nothing. `read` (`pre`): what the *next* sub-layer reads. Streams have become
# different.
#
# **The knob:** let each sub-layer read with the `pre` from $d$ sub-layers before. It was trained with $d = 1$; $d = 0$
# is V4's mode. **Guess first:** draw the loss added, for $d$ from 0 to 5.

# %%
base = loss(model, FEW)


def altered(change):
    """Loss added when `change` alters pre, post and comb of every sub-layer, numbered from 0."""
    other = copy.deepcopy(model)
    hcs = [hc for layer in other.layers for hc in (layer.hc_attn, layer.hc_ffn)]
    for k, hc in enumerate(hcs):
        # made: pre, post, comb, and the streams, which go on as they are.
        hc.register_forward_hook(lambda module, given, made, k=k: (*change(k, *made[:3]), made[3]))
    return loss(other, FEW) - base

# %%
def later(d):
    """The pre of d sub-layers before, instead of the one before."""
    kept = {}

    def change(k, pre, post, comb):
        kept[k] = pre  # what sub-layer k hands on is read by sub-layer k + 1
        return kept[max(0, k - d + 1)], post, comb

    return altered(change)

# %%
by_delay = {0: loss(ds.variant(model, mhc_mode="multi_pass"), FEW) - base} | {d: later(d) for d in (1, 2, 3, 4, 5)}
ax = plot_curves({"loss added": by_delay}, xlabel="d: whose pre is read, in sub-layers before",
                 ylabel="loss added, nats", model="the example, trained with 1")  # fmt: skip
assert by_delay[1] == 0 and max(by_delay.values()) > 0.1 and min(by_delay.values()) > -0.02

# %% [markdown]
# Lowest where it was trained. But $d = 0$ costs little, and later is not always worse: at $d = 4$ there is a dip, whose
# cause we did not look for. What the curve does not show: a model *trained* with $d = 3$, which may well be as good.

# %% [markdown]
# ## Why normalise, and why twice?
#
# A stream passes 80 mixings in `flash`. Suppose each `comb` is random: four times the identity plus noise, made
# positive and normalised. And once left free: the identity plus a quarter of that noise.
#
# **Guess first:** by which factor can streams, or on the way back gradients, have grown after 80: about 1, 10, a
# thousand? Free, with rows normalised alone, columns alone, and both?

# %%
noise = torch.randn(sublayers, 200, N, N, dtype=torch.float64)
logits = 4 * torch.eye(N) + noise
ways = {"free": torch.eye(N) + noise / 4, "rows alone": logits.softmax(-1), "columns alone": logits.softmax(-2),
        "both": sinkhorn(logits, flash.hc_sinkhorn_iters, EPS)}  # fmt: skip

# %%
def growth(combs):
    """By depth, the factor by which the largest stream or gradient can grow: median of 200 draws, as a power of ten."""
    product, found = torch.eye(N, dtype=torch.float64), {0: 0.0}
    for depth, comb in enumerate(combs, 1):
        product = product @ comb
        forward, backward = (product.abs().sum(axis).amax(-1) for axis in (-2, -1))
        found[depth] = torch.maximum(forward, backward).median().log10().item()
    return found

# %%
grown = {name: growth(combs) for name, combs in ways.items()}
ax = plot_curves(grown, xlabel="sub-layers", ylabel="largest growth, powers of ten", model="random mixings")
assert grown["free"][80] > 2 and max(grown["rows alone"][80], grown["columns alone"][80]) < 0.3
assert abs(grown["both"][80]) < 0.02

# %% [markdown]
# Free matrices explode. But *either* normalisation alone prevents that. If columns add up to 1, each new stream is a
# mean of old ones, and nothing grows. On the way back rows and columns change places: then a gradient can gather in one
# stream, up to $N$ times, not more at any depth.
#
# What do both give beyond that? The mean over streams should pass unchanged, as in a plain residual. Rows see to it on
# the way forward, columns for gradients on the way back.

# %%
streams = torch.randn(200, N, 64, dtype=torch.float64)
for name, combs in ways.items():
    mixed = streams
    for comb in combs:
        mixed = comb.mT @ mixed
    kept = (mixed.mean(1) - streams.mean(1)).norm() / streams.mean(1).norm()
    apart = (mixed - mixed.mean(1, keepdim=True)).norm() / (streams - streams.mean(1, keepdim=True)).norm()
    print(f"{name:14} mean over streams changed by {kept:8.3f} of its size; differences left {apart:8.3f}")
    assert name != "both" or (kept < 0.02 and apart < 0.1)

# %% [markdown]
# And one thing both cannot prevent: what made the streams *different* is gone after 80 random mixings. Whatever keeps
# streams apart must be new outputs, or matrices close to the identity.
#
# How many rounds does a trained toy want? Its rows add up to 1 only after some. (Columns come last, they always do.)
# **Guess first:** one round instead of 20, after training: how much loss is added?

# %%
by_rounds, errors = {}, {}
for rounds in (1, 2, 5, 20):
    changed, trace = ds.variant(model, hc_sinkhorn_iters=rounds), ds.Trace("layers.*.hc_*.comb")
    with torch.no_grad():
        changed(text, trace=trace)
    combs = torch.stack([trace[f"layers.{layer}.{hc}.comb"] for layer in range(8) for hc in ("hc_attn", "hc_ffn")])
    errors[rounds] = (combs.sum(-1) - 1).abs().amax(-1).mean().item()  # the worst row, mean over all matrices
    by_rounds[rounds] = loss(changed, FEW) - base

# %%
ax = plot_curves({"loss added": by_rounds, "row error": errors}, xlabel="rounds (hc_sinkhorn_iters), trained with 20",
                 ylabel="row error, and loss added in nats", model="the example")  # fmt: skip
print("loss added:", ", ".join(f"{rounds}: {added:+.3f}" for rounds, added in by_rounds.items()))
assert errors[1] > 4 * errors[20] and max(by_rounds.values()) < 0.05

# %% [markdown]
# The rows mend with every round. The loss does not care: with one round it is nearly what it was with 20. Does it need
# this matrix at all?
#
# ## Take it away
#
# **Guess first:** three kinds of coefficients, `pre`, `post` and `comb`. Put something plain in the place of each.
# Which one will the example miss most, which least?

# %%
def mean_of(x):
    """The same for every token."""
    return x.mean((0, 1), keepdim=True).expand_as(x)


eye = torch.eye(N)
plain = {
    "comb: the identity, streams never meet": lambda k, pre, post, comb: (pre, post, eye.repeat(*comb.shape[:2], 1, 1)),
    "comb: transposed": lambda k, pre, post, comb: (pre, post, comb.mT.contiguous()),
    "comb: all 1/4, streams become one": lambda k, pre, post, comb: (pre, post, torch.full_like(comb, 1 / N)),
    "pre: its mean over tokens": lambda k, pre, post, comb: (mean_of(pre), post, comb),
    "pre: all 1/4": lambda k, pre, post, comb: (torch.full_like(pre, 1 / N), post, comb),
    "post: its mean over tokens": lambda k, pre, post, comb: (pre, mean_of(post), comb),
    "post: all 1": lambda k, pre, post, comb: (pre, torch.ones_like(post), comb),
}
added = {name: altered(change) for name, change in plain.items()}
print("\n".join(f"{name:40} {more:+.3f} nats" for name, more in added.items()))
names = list(plain)
assert abs(added[names[0]]) < 0.05 and min(added[names[2]], added[names[4]]) > 0.2 and added[names[6]] > 1

# %% [markdown]
# **It hurts**, and not where most of the theory is. How much of an output is written, and where (`post`), is worth
# most. Reading evenly, or making one stream of four, costs some four tenths of a nat.
#
# But the *matrix*, normalised in 20 rounds, may go: the identity in its place, or even its transpose, hardly changes
# the loss. Eight layers are not 40, and a matrix that starts near the identity had little time to leave it. What it
# does in the released model we did not measure.

# %% [markdown]
# ## What it costs
#
# Streams belong to the token that is being computed. No later token reads them.

# %% tags=["nbval-check-output"]
one = flash.replace(hc_mult=1)
assert kv_bytes(flash).bytes_per_token == kv_bytes(one).bytes_per_token
assert scored_entries(flash, 2**20) == scored_entries(one, 2**20)
weights = DecodeTraffic(flash, "flash").at(2**12).weights
print(f"cache bytes per token {float(kv_bytes(flash).bytes_per_token):g}, with one stream the same; pool the same")
print(f"weights {count_parameters(flash)['hyper-connections'].stored / 1e6:.1f}M, work {work / 1e6:.0f} MFLOP a token;"
      f" a lone token reads {weights / 1e9:.1f} GB of weights")
for name in SCHEDULES:
    moved = int(sublayers * mixing_traffic(name, N) * D * torch.bfloat16.itemsize)
    print(f"{name:11} moves {moved / 1e6:5.2f} MB a token in 16 bits, {moved / weights:.2%} of those weights;"
          f" {work / moved:.0f} FLOP per byte")
print(f"for comparison, weights of 8 bits that 256 tokens share: {2 * 256} FLOP per byte")

# %% [markdown]
# A lone token does not notice its streams beside the weights. In a prompt or a large batch many tokens share each
# weight that is read, but every token has streams of its own, with few FLOPs per byte. Such work waits for memory, and
# half the traffic is half the wait.
#
# > **Correction.** Popular accounts call single-pass mHC a mixed-precision scheme. It changes no number format. mHC are
# manifold-constrained hyper-connections; "single-pass" shifts the input mix by one sub-layer, as in the naive loop.

# %% [markdown]
# ## Exercise 1
#
# `flash` gets eight streams instead of four. How many bytes do a token's streams then move, single-pass, through all
# sub-layers, in numbers of 16 bits?
#
# <details><summary>Hint</summary>
#
# Each pass reads all streams and the output, and writes all streams and the next input.
#
# </details>

# %%
moved_bytes = ...
check_moved_bytes(moved_bytes)

# %% [markdown]
# ## Exercise 2
#
# Write Sinkhorn in plain Python, without EPS: from a list of rows of logits and the number of rounds, the matrix as a
# list of rows. A round is rows, then columns.
#
# <details><summary>Hint</summary>
#
# Exponentials first. `zip(*matrix)` gives the columns.
#
# </details>

# %%
sinkhorn_by_hand = ...  # such as: lambda logits, rounds: logits
check_balanced(sinkhorn_by_hand)

# %% [markdown]
# ## Exercise 3
#
# Given the streams before each sub-layer and after the last (`[n + 1, N, D]`), and the `pre` of each (`[n, N]`), write
# a function that returns what the $n$ sub-layers and then the output head read, single-pass: `[n + 1, D]`.
#
# <details><summary>Hint</summary>
#
# Whose `pre` does the first reader use? And the head?
#
# </details>

# %%
read_by_all = ...  # such as: lambda streams, pres: streams[:, 0]
check_inputs(read_by_all)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
def by_hand(logits, rounds):
    matrix = torch.tensor(logits).double().exp()
    for _ in range(rounds):
        matrix = matrix / matrix.sum(1, keepdim=True)
        matrix = matrix / matrix.sum(0, keepdim=True)
    return matrix.tolist()


def readers(streams, pres):
    mixes = [torch.eye(streams.shape[1]).double()[0], *pres]
    return torch.stack([mix @ X for mix, X in zip(mixes, streams, strict=True)])


check_moved_bytes(sublayers * (2 * 8 + 2) * D * 2)
check_balanced(by_hand)
check_inputs(readers)
assert refuses(check_moved_bytes, sublayers * (2 * 4 + 2) * D * 2) and refuses(check_balanced, lambda x, rounds: x)
assert refuses(check_inputs, lambda streams, pres: streams[:, 0])

# %% [markdown]
# ## Recap
#
# - A sub-layer reads a mix of four streams and writes to all: 0.28% of the work, 20 rows of traffic in V4, 10 in V4.1.
# - Single-pass: the mix is the `pre` of the sub-layer before. Trained so, it cost nothing; run in the other mode, a
#   model loses.
# - Either normalisation bounds growth; both keep the mean over streams.
# - The example needs `post` and `pre`, not the matrix.

# %% [markdown]
# [Technical report](https://arxiv.org/abs/2609.19969): §2.4.1. Before it: **lesson 00**, the tour. Next: **lesson 09**,
# what the second sub-layer of a layer does.

# %% [markdown]
# ## 中文小结
#
# 1. 每个词元有四条残差流；混合只占 0.28% 的运算量，搬运却多：V4 每个子层 20 行，V4.1 只要 10 行。
# 2. “单遍”是指：子层读入时用前一个子层给出的系数；这不是混合精度。
# 3. 这样训练，损失看不出变差；训练好之后再换方式，损失就上升。
# 4. 只归一化行或只归一化列就能防止爆炸；两者都做，各流的平均值才不变。
# 5. 玩具模型最需要 post 和 pre；把混合矩阵换成单位矩阵，损失几乎不变。
