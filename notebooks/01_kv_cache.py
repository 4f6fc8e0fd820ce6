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
# # Why is memory the bill?
#
# **Lesson 01, two phases and the KV cache.** 25 minutes to read, about a minute to run on one CPU thread, no GPU.
# It needs lesson 00 alone.
#
# Afterwards you can
# 1. write a KV cache in a few lines, and say why it changes no answer;
# 2. tell the two phases apart: one is bound by arithmetic, the other by reading memory;
# 3. compute how many conversations fit into a memory, and when reading the cache outweighs reading the weights.

# %%
import math
import time

import torch

import tinyds41 as ds
from tinyds41.cost.flops import decode_cost
from tinyds41.cost.generations import GENERATIONS
from tinyds41.cost.prefill import prefill_cost
from tinyds41.cost.traffic import DecodeTraffic, generation_bytes
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_01 import check_fit, check_runs, check_take_back
from tinyds41.model.context import Entries, Sequence
from tinyds41.show.context_plots import plot_by_context
from tinyds41.show.distance_plots import plot_by_distance
from tinyds41.show.generation_plots import generation_rows, plot_generation_bytes
from tinyds41.train.corpus import Corpus, data_folder, documents
from tinyds41.train.note import Note
from tinyds41.train.tasks import needle_config

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run
_ = torch.manual_seed(0)

# %% [markdown]
# ## Feel the problem
#
# A model reads and writes *tokens*, pieces of words. It is a stack of *layers*, each of which works on a list of
# numbers per token. In a layer, *attention* lets a token take in something of those before it.

# %% [markdown]
# To write, the model runs over the text and says how likely each token is to come next. We append the likeliest and
# run again. And again.
#
# **Guess first:** a text of 26 tokens, 24 more to write. On how many tokens does a layer run in all, if a token that
# runs again counts again?

# %%
def write(model, ids, n, *, cached):
    """The n likeliest tokens after ids, the scores (logits) they had, and how many tokens each layer ran on for it."""
    ids, seen, runs, session = list(ids), [], [], ds.Session(model)
    for i in range(n):
        if cached and i:
            logits = session.decode(ids[-1])
        else:
            session = ds.Session(model)  # a text to begin; it remembers nothing of earlier runs
            logits = session.prefill(ids, mode="full")  # every layer on every token
        [run] = set(session.counters.tokens_run.values())  # the same in all layers
        ids, seen, runs = [*ids, int(logits.argmax())], [*seen, logits], [*runs, run]
    return ids, torch.cat(seen), runs

# %% tags=["nbval-check-output"]
model = ds.example("text")  # a trained toy of eight layers that comes with the package
prompt = model.tokenizer.encode("PROSPERO:\nMy charms crack not; my spirits obey;")
again, _, runs = write(model, prompt, 24, cached=False)
print(f"{len(prompt)} tokens and 24 new ones: each layer ran on {sum(runs)} tokens; the first time {runs[0]},"
      f" the last {runs[-1]}")
assert sum(runs) == sum(range(26, 26 + 24)) == 900 and len(prompt) == 26

# %% [markdown]
# 900, where the longest text that ran had 49. Every token was worked on again and again. Did anything new come out?

# %% [markdown]
# ## One equation
#
# In a layer each token $t$ makes three vectors: a *query* $q_t$, what it looks for; a *key* $k_t$, by which it is
# found; a *value* $v_t$, what it hands over. With $C$ numbers in a key, token $t$ takes in a mean of values, whose
# weights $a$ add up to 1:
#
# $$\sum_{j \le t} a_{tj}\, v_j, \qquad a_{tj} = \frac{e^{q_t \cdot k_j / \sqrt C}}
# {\sum_{i \le t} e^{q_t \cdot k_i / \sqrt C}}$$

# %% [markdown]
# Look at $j \le t$: a token takes in nothing of later ones. So what layer 0 makes of it does not depend on them; nor
# does what layer 1 makes of that, and so on. The key $k_j$ and the value $v_j$ of token $j$ never change again, in any
# layer.
#
# So we keep them. That store is the **KV cache**. Of earlier tokens nothing else is needed: their queries have done
# their work.

# %% [markdown]
# ## Naive version
#
# Three layers of attention alone; each adds what a token takes in to the token's numbers $x$. `whole` runs on all
# tokens at once, as for a prompt: that phase is called **prefill**. `step` runs on a single one and finds the others
# in the cache: **decode**.

# %%
WIDTH, LAYERS = 16, 3
weights = torch.randn(LAYERS, 3, WIDTH, WIDTH).double() / WIDTH**0.5  # per layer: to query, key, value


def whole(x):
    """All tokens at once, [tokens, WIDTH]; later ones are hidden."""
    hidden = torch.ones(len(x), len(x)).triu(1).bool()
    for query, key, value in weights:
        scores = (x @ query) @ (x @ key).T / WIDTH**0.5
        x = x + scores.masked_fill(hidden, -math.inf).softmax(-1) @ (x @ value)
    return x


def step(x, cache):
    """One token, [WIDTH]: its key and value join each layer's list."""
    for (query, key, value), kept in zip(weights, cache, strict=True):
        kept.append((x @ key, x @ value))
        keys, values = map(torch.stack, zip(*kept, strict=True))
        x = x + (keys @ (x @ query) / WIDTH**0.5).softmax(-1) @ values
    return x

# %%
tokens, cache = torch.randn(20, WIDTH).double(), [[] for _ in range(LAYERS)]
stepped = torch.stack([step(x, cache) for x in tokens])
stored = sum(row.numel() for kept in cache for pair in kept for row in pair)
print(f"largest difference {(stepped - whole(tokens)).abs().max():.0e}; {stored // 20} numbers kept per token")
assert torch.allclose(stepped, whole(tokens), atol=1e-12) and stored == 20 * LAYERS * 2 * WIDTH  # float64 sums

# %% [markdown]
# Equal, but for the last digits of float64. Per token the cache has $2 \cdot \text{width} \cdot \text{layers}$
# numbers, and it is read in full for every new token.
#
# ## The library's version
#
# A `Session` is a model with such a cache. It rounds what it stores to 4 and 8 bits, and so does the model when it runs
# on a whole text: it was trained that way. So both must agree again.
#
# **Guess first:** on how many tokens does a layer run now, instead of 900?

# %% tags=["nbval-check-output"]
written, logits, cached_runs = write(model, prompt, 24, cached=True)
print(f"each layer ran on {sum(cached_runs)} tokens instead of {sum(runs)}: {cached_runs[:4]} and so on")
print(f"the same 24 tokens: {written == again}")
assert written == again and sum(cached_runs) == len(prompt) + 23

# %%
with torch.no_grad():
    at_once = model(torch.tensor([written[:-1]]))[0, len(prompt) - 1 :]
print(f"largest difference to one run over everything {(logits - at_once).abs().max():.0e}, scores up to"
      f" {at_once.abs().max():.0f}")
assert (logits - at_once).abs().max() < 0.05 and (logits.argmax(-1) == at_once.argmax(-1)).all()
print(model.tokenizer.decode(written))

# %% [markdown]
# Prefill once, then a single token at a time. Let us count while a text grows from its first token.

# %%
grown = {"all again": write(model, prompt[:1], 32, cached=False)[2],
         "with a cache": write(model, prompt[:1], 32, cached=True)[2]}  # fmt: skip
curves = {name: {n: sum(run[:n]) for n in (1, 2, 4, 8, 16, 32)} for name, run in grown.items()}
ax = plot_by_context(curves, title="Writing from a single token with the toy", xlabel="tokens written",
                     ylabel="tokens run, per layer")  # fmt: skip
assert curves["all again"][32] == 32 * 33 // 2 and curves["with a cache"][32] == 32

# %% [markdown]
# Quadratic against linear: on axes that multiply step by step, the upper line ends twice as steep as the lower. The
# picture counts tokens alone. It does not show that a cached step is the same work at any length: the longer the text,
# the more is kept to look through.

# %% [markdown]
# *Work* is counted in FLOPs, multiplications and additions; a GFLOP is a billion, a TFLOP a thousand GFLOP.
#
# **Guess first:** the released model has read 32,768 tokens. How many times as much work is the next one without a
# cache as with it?

# %% tags=["nbval-check-output"]
flash = ds.Config.preset("flash")
rerun, one = prefill_cost(flash), decode_cost(flash)
for context in (2**12, 2**15, 2**20):
    all_again, work = rerun.at(context, "full").total, one.at(context, "raw").total
    print(f"{context:>9,} tokens: {work / 1e9:5.1f} GFLOP with a cache, {all_again / 1e12:9,.0f} TFLOP without:"
          f" {all_again / work:9,.0f} times")
    assert 0.7 < all_again / work / context < 1

# %% [markdown]
# About as many times as there are tokens. So everybody keeps a cache. That saves work and costs memory; this lesson
# looks at the price.
#
# ## Two phases
#
# Prefill and decode multiply each token by the same weights. (Nearly: lesson 03.) What differs is how often weights are
# *read*: once per run, be it for one token or for thousands.
#
# **Guess first:** a matrix times 64 vectors at once. How many times as long does it take as times one?

# %%
# NBVAL_IGNORE_OUTPUT
matrix = torch.randn(4096, 4096)  # 67 MB: more than fits near the processor


def seconds(n):
    """The fastest of eight products with n vectors."""
    vectors, taken = torch.randn(4096, n), []
    for _ in range(8):
        start = time.perf_counter()
        matrix @ vectors
        taken.append(time.perf_counter() - start)
    return min(taken)


taken = {n: seconds(n) for n in (1, 4, 16, 64)}
for n, time_taken in taken.items():
    print(f"{n:3} vectors: {time_taken / taken[1]:5.1f} times one, so {time_taken / taken[1] / n:.2f} times per vector")

# %% [markdown]
# On this processor, far less than 64 times. A single vector waits for the matrix to arrive from memory; many share one
# reading. (The run above tells how far, and whether already 4 gain much; other machines differ.)
#
# That is why prefill is *bound by arithmetic*, and decode *by reading memory*.

# %% [markdown]
# How far apart are they in the released model? Count FLOPs per byte of weights read. An accelerator, a chip made for
# such products, can do some hundreds in the time of one byte.

# %% tags=["nbval-check-output"]
newest = DecodeTraffic(flash)
weights_read = newest.at(1).weights  # with the experts of one token (lesson 00); 4-bit and 8-bit numbers
# Thousands of tokens use all experts: what if each token used all?
all_experts = DecodeTraffic(flash.replace(num_experts_per_tok=flash.n_routed_experts)).at(1).weights
print(f"decode: one token reads {weights_read / 1e9:.1f} GB of weights and does"
      f" {one.at(1, 'raw').linear / weights_read:.1f} FLOPs per byte")
for n in (2**12, 2**15):
    print(f"prefill of {n:,} tokens: all {all_experts / 1e9:.0f} GB, {rerun.at(n, 'full').linear / all_experts:,.0f}"
          " FLOPs per byte")
assert one.at(1, "raw").linear / weights_read < 3 and rerun.at(2**12, "full").linear / all_experts > 200

# %% [markdown]
# A few FLOPs per byte: in decode of one text nearly all arithmetic units wait. So for the speed of decode count **bytes
# read**, and for how many users a machine serves count **bytes kept**.

# %% [markdown]
# ## Bytes kept
#
# The ordinary cache is the naive one: two vectors per layer, for several heads (copies of attention side by side), each
# number two bytes. Later generations of DeepSeek's models shrank it, in ways that the next lessons explain one by one.
# V1 is the first of lesson 00; *Flash* and *Pro* are a smaller and a larger model of one generation.

# %%
ax = plot_generation_bytes(generation_rows(GENERATIONS.values()))
per_token = {name: float(model.kv_bytes().bytes_per_token) for name, model in GENERATIONS.items()}
assert (per_token["V1"], per_token["V4.1-Flash"]) == (95 * 2 * 8 * 128 * 2, 890) == (389_120, 890)

# %% [markdown]
# The axis is logarithmic: each number on it is ten times the one before. (The hatched bar rests on an assumption,
# written below.) What it does not show: how good the answers are that so few bytes allow.
#
# **Guess first:** beside its weights a machine has 64 GB free. How many conversations of 131,072 tokens fit, with V1?
# With V4.1? And of a million tokens?

# %% tags=["nbval-check-output"]
memory = 64 * 10**9
for name in ("V1", "V3", "V3.2", "V4-Flash", "V4.1-Flash"):
    # After the loop, held is that of the last one, V4.1-Flash.
    held = {context: GENERATIONS[name].kv_bytes().bytes_at(context) for context in (2**12, 2**17, 2**20)}
    print(f"{name:10}", ", ".join(f"{memory // size:>6,} of {context:,}" for context, size in held.items()),
          f"tokens; the longest takes {held[2**20] / 1e9:.2f} GB")
assert memory // GENERATIONS["V1"].kv_bytes().bytes_at(2**17) == 1 and memory // held[2**17] == 536
assert (round(GENERATIONS["V1"].kv_bytes().bytes_at(2**20) / 1e9), round(held[2**20] / 1e9, 2)) == (408, 0.94)

# %% [markdown]
# One conversation against 536. That is the bill: a full memory turns people away while arithmetic units wait. (0.94 GB
# is a little more than in lesson 00: here windows count, too; of them more below.)
#
# ## The knob: length
#
# Do not believe a formula: here are the real buffers of a released-size cache, filled with random rows, no weights
# needed. We turn one knob, the number of tokens read.

# %% tags=["nbval-check-output"]
reports = {}
for n in (100, 1_000, 10_000, 100_000):
    filled = ds.Cache(flash)
    filled.fill(n)
    reports[n] = filled.report()
    print(f"{n:>7,} tokens: {reports[n].growing_bytes:>10,} bytes that grow, windows {reports[n].window_bytes:>9,}")
assert all(report.growing_bytes == 890 * n for n, report in reports.items())
assert reports[1_000].window_bytes == reports[100_000].window_bytes == 40 * 128 * 528 > reports[100].window_bytes

# %% [markdown]
# Exactly 890 bytes per token. *Windows*, the rows of the last 128 tokens in each of 40 layers, fill once and stay.
# (Lesson 02 is about them.)
#
# ## Bytes read
#
# V1 reads its whole cache for every token, and all its weights: 67 billion numbers of two bytes.
#
# **Guess first:** one conversation with V1. At how many tokens of context does it read as many bytes of cache as of
# weights? It was made for 4,096.

# %% tags=["nbval-check-output"]
v1_weights = 67 * 10**9 * 2
equal = v1_weights / per_token["V1"]


def reads(name, context):
    """Bytes of cache that one generated token reads."""
    return newest.at(context).cache if name == "V4.1-Flash" else generation_bytes(GENERATIONS[name], context).cache


print(f"V1: {v1_weights / 1e9:.0f} GB of weights = the cache of {equal:,.0f} tokens, {equal / 2**12:.0f} times 4,096")
for name in ("V1", "V4.1-Flash"):
    for context in (2**12, 2**20):
        read, size = reads(name, context), v1_weights if name == "V1" else weights_read
        print(f"{name:10} {context:>9,} tokens: cache {read / 1e9:8.3f} GB, weights {size / 1e9:5.1f} GB:"
              f" the cache is {read / (read + size):.1%}")
assert round(equal) == 344_367 and read < 0.02 * weights_read

# %% [markdown]
# **The surprise.** For one conversation the cache is hardly on the bill: with V1 not before 344,367 tokens, with V4.1
# not even at a million.
#
# > **Correction.** "Decode is slow because it reads the KV cache" is not so for a single user, up to those lengths:
# most of what it reads are weights.

# %%
contexts = [2**power for power in range(10, 21)]
names = ("V1", "V3", "V3.2", "V4-Flash", "V4.1-Flash")
curves = {name: {n: reads(name, n) for n in contexts} for name in names}
ax = plot_by_context(curves, title="Bytes of cache that one generated token reads, V1 to V4.1-Flash", ylabel="bytes",
                     baselines={"weights of V1": v1_weights, "weights of V4.1-Flash": weights_read})

# %% [markdown]
# Two shapes. Straight lines: everything kept is read. Bent lines: small keys of all entries are read and large rows of
# a few; lesson 05 tells how. V4.1 keeps 0.94 GB at a million tokens and reads a fifth of that.
#
# What the figure does not show: that one machine serves many.

# %% [markdown]
# ## Many conversations at once
#
# Run a token of each conversation together, a *batch*: weights are read once for all, a cache for each. **Guess
# first:** at 4,096 tokens each, how many must talk to V1 until as many bytes of caches are read as of weights?

# %% tags=["nbval-check-output"]
for name, size in (("V1", v1_weights), ("V4.1-Flash", weights_read)):
    talking = size / reads(name, 2**12)
    print(f"{name:10} {size / 1e9:5.1f} GB of weights = caches of {talking:,.0f} conversations of 4,096 tokens")
assert round(v1_weights / reads("V1", 2**12)) == 84

# %% [markdown]
# So the cache is what a *busy* machine pays for. With V1, beyond 84 conversations it is most of what is read. With V4.1
# that comes later.
#
# But the second line cheats. V4.1 is a *mixture of experts*: each token uses 6 of 384 small networks per layer, and
# tokens of other conversations use others. Is a weight still read once for all?
#
# **Guess first:** 64 conversations with V4.1. How many times the weight bytes of one?

# %% tags=["nbval-check-output"]
def used(batch, experts, chosen):
    """How many experts of a layer a batch uses, were each token's choice drawn evenly."""
    # A token misses an expert with probability 1 - chosen / experts; all must miss it for it not to be used.
    return experts * (1 - (1 - chosen / experts) ** batch)


per_expert = (all_experts - weights_read) / (384 - 6)  # one more expert in every layer
for batch in (1, 8, 64, 512):
    size = weights_read + per_expert * (used(batch, 384, 6) - 6)
    print(f"{batch:3} tokens: {used(batch, 384, 6):5.1f} experts a layer, {size / 1e9:6.1f} GB,"
          f" {size / weights_read:4.1f} times one token's; {size / batch / 1e9:5.2f} GB each")
users = all_experts / reads("V4.1-Flash", 2**20)
print(f"all experts: as many bytes as {users:,.0f} conversations of a million tokens read of their caches; they keep"
      f" {users * held[2**20] / 1e9:,.0f} GB")
assert (flash.n_routed_experts, flash.num_experts_per_tok) == (384, 6) and round(users * held[2**20] / 1e9) == 1456

# %% [markdown]
# **A miss** for the rule "a batch reads weights once": eight tokens use 45.5 experts, nearly each its own. Only
# hundreds share well. And for caches of a million tokens to cost as much reading as all experts, so many must talk that
# their caches fill 1,456 GB. A machine with less is full before: with V4.1 bytes *kept* are the limit.

# %% [markdown]
# Evenly drawn is an assumption. **Guess first:** the trained toy has 8 experts a layer and uses 2. Tokens from several
# places in a play: more experts than evenly drawn, or fewer?

# %%
tokenizer = ds.Tokenizer.load(data_folder())
play = Corpus.from_texts(tokenizer, documents("plays", "held_out")).ids.long()
trace = ds.Trace("layers.*.ffn.experts", queries=[31])
with torch.no_grad():
    model(play[: 64 * 400].reshape(64, 400)[:, :32], trace=trace)  # 64 places, 400 tokens apart
layers = torch.stack([trace[f"layers.{layer}.ffn.experts"][:, 0] for layer in range(8)])
for batch in (1, 2, 4, 8, 16):
    groups = layers.reshape(8, 64 // batch, -1)  # layer, group of conversations, experts that it uses
    mean = sum(len(set(group.tolist())) for layer in groups for group in layer) / groups.shape[:2].numel()
    print(f"{batch:2} tokens: {mean:.2f} experts used, evenly drawn {used(batch, 8, 2):.2f}")
    assert abs(mean - used(batch, 8, 2)) < 0.3

# %% [markdown]
# Neither: within a small fraction of one expert. We had expected fewer, with some experts in fashion, and were wrong.
#
# ## A cache that forgets
#
# If bytes are the bill, why not throw the oldest away? Let us train a toy that must remember. A text holds one *note*
# (a word of sixteen) among fillers; from there on every token must say it.

# %%
task = Note()
toy = needle_config(task, sliding_window=4, index_topk=64, index_source_layer_ids=(2,), candidate_source_layer_id=None,
                    candidate_topk_blocks=0)  # fmt: skip
print(toy.plan())
pupil = ds.Model(toy, seed=0)
history = ds.train(pupil, task, steps=70, batch_size=32, length=32, seed=0, learning_rate=3e-3)
print(f"loss at first {history.losses[0]:.2f}, a blind guess {math.log(task.n_notes):.2f}, mean of the last ten steps"
      f" {sum(history.losses[-10:]) / 10:.2f} nats per token")
assert sum(history.losses[-10:]) / 10 < 0.5

# %% [markdown]
# Layers 0 and 1 see windows of four tokens. Layer 2 besides writes an *entry* for every two tokens; layers 2 and 3
# attend to all of them, however far back. The cache grows by these entries.

# %% [markdown]
# Now we let only the newest entries be seen. **Guess first:** the toy keeps the newest 8 of 48 entries. How many tokens
# behind the note do answers fail? And where they fail, which probability does it give its answer: one in sixteen, or
# nearly as much as where it knows?

# %%
class Forgetful(Sequence):
    """A text whose tokens see the newest `keep` entries only."""

    def __init__(self, config, ids, keep):
        super().__init__(config, ids)
        self.keep = keep

    def entries(self, source):
        seen = super().entries(source)  # a token sees entries first to last - 1
        return Entries(seen.kv, seen.keys, (seen.last - self.keep).clamp(min=0), seen.last)


batch = task.batch(step=0, batch_size=100, length=96, seed=1)  # three times as long as it was taught
# The first token that must be answered with the note is the note itself: its place.
rows, place = torch.arange(100), (batch.wanted == batch.wanted[:, -1:]).int().argmax(-1)

# %%
@torch.no_grad()
def quiz(keep):
    """By distance behind the note: share of right answers, and the probability that the toy gives its answer."""
    ctx = Forgetful(toy, batch.ids[:, :-1], keep)
    # The model's lower half, its upper half (lesson 00), its scores; of their probabilities the largest.
    sure, said = pupil.logits(pupil.decode(pupil.encode(batch.ids[:, :-1], ctx), ctx)).softmax(-1).max(-1)
    right = (said == batch.wanted).float()
    return tuple({d: x[rows, place + d].mean().item() for d in range(49)} for x in (right, sure))


asked = {keep: quiz(keep) for keep in (48, 16, 8, 4)}
ax = plot_by_distance(
    {f"{keep} entries": right for keep, (right, _) in asked.items()}, ylabel="share of right answers",
    borders={f"{keep} entries": 2 * keep for keep in (16, 8, 4)}, baseline=("chance", 1 / task.n_notes),
    xlabel="distance behind the note, tokens",
    title="Answers of the toy from the newest entries, two tokens each")  # fmt: skip

# %%
def mean(curve, distances):
    """Over some distances."""
    return sum(curve[d] for d in distances) / len(distances)


for keep, (right, sure) in asked.items():
    print(f"newest {keep:2} entries: at 1 to 6 right {mean(right, range(1, 7)):.2f}, at 41 to 48 right"
          f" {mean(right, range(41, 49)):.2f}, sure {mean(sure, range(41, 49)):.2f}")
assert mean(asked[48][0], range(41, 49)) > 0.9 and mean(asked[8][0], range(41, 49)) < 0.25
assert mean(asked[8][0], range(1, 15)) > 0.9
assert mean(asked[8][1], range(41, 49)) > mean(asked[48][1], range(41, 49)) - 0.2 > 0.4

# %% [markdown]
# **It hurts.** Where the note has left the cache, answers are as good as chance. They last a few tokens longer than the
# dashed borders, the tokens that the kept entries stand for. A likely reason, not tested: windows carried the note on,
# into entries written later.

# %% [markdown]
# **The second surprise:** it is nearly as *sure* as before, and wrong. Nothing in it says "I have forgotten".
#
# What this does not show: that any model would be so. This one never met a text without a note, so it had no reason to
# learn doubt.

# %% [markdown]
# ## What it costs
#
# The cache of V4.1 keeps 890 bytes per token, and 2,703,360 bytes of windows. (The pool of lesson 00 is made anew for
# each token; nothing of it is kept.) At a million tokens, one generated token reads:

# %% tags=["nbval-check-output"]
read, kept = newest.at(2**20), held[2**20]
for what in ("weights", "index_keys", "global_rows", "window_rows", "engram_rows"):
    print(f"{what:12} {getattr(read, what):>14,} bytes, {getattr(read, what) / read.total:7.3%}")
print(f"of {kept:,} bytes kept, {read.cache / kept:.0%} are read; V1 reads all of its {per_token['V1'] * 2**20:,.0f}")
assert 0.19 < read.cache / kept < 0.22

# %% [markdown]
# ## Exercise 1
#
# A prompt of $p$ tokens, $n$ new ones. On how many tokens does a layer run in all, without a cache and with it? Write a
# function that returns both, in this order. Nothing runs on the last new token. The check lets a session count.
#
# <details><summary>Hint</summary>
#
# The first printed number of this lesson was a sum from `runs[0]` to `runs[-1]`.
#
# </details>

# %%
tokens_run = ...  # such as: lambda p, n: (p * n, p + n)
check_runs(tokens_run)

# %% [markdown]
# ## Exercise 2
#
# How many conversations of $n$ tokens with V4.1 fit into a memory of so many bytes? Write it as a function, exact to
# the byte, windows included.
#
# <details><summary>Hint</summary>
#
# Lesson 00: three layers keep 356 bytes for every *two* tokens, a pair that is not complete keeps nothing yet; one
# layer keeps 356 for each token. Windows: 40 layers of 528 bytes for each of the last 128 tokens, if there are so many.
#
# </details>

# %%
fits = ...  # such as: lambda memory, n: memory // (890 * n)
check_fit(fits)

# %% [markdown]
# ## Exercise 3
#
# Somebody edits the last $n$ tokens of a text. Write a function that takes a naive cache, a list per layer of pairs
# (key, value), and returns a new one without those tokens. The old one must stay as it is, also when the new one grows.
#
# <details><summary>Hint</summary>
#
# A slice copies a list. Try yours with $n = 0$.
#
# </details>

# %%
take_back = ...  # such as: lambda cache, n: cache
check_take_back(take_back)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
check_runs(lambda p, n: (n * p + n * (n - 1) // 2, p + n - 1))
check_fit(lambda memory, n: memory // (356 * (3 * (n // 2) + n) + 40 * 528 * min(n, 128)))
check_take_back(lambda cache, n: [kept[: len(kept) - n] for kept in cache])
assert refuses(check_runs, lambda p, n: (n * p + n * (n - 1) // 2, p + n))
assert refuses(check_fit, lambda memory, n: memory // (890 * n))
assert refuses(check_take_back, lambda cache, n: [kept[:-n] for kept in cache])

# %% [markdown]
# ## Recap
#
# - A token's keys and values never change: keep them, and each new token runs alone. The count of tokens run becomes
# linear, answers stay.
# - Prefill reads weights once for many tokens, decode for one: it waits for memory.
# - A million tokens: 408 GB in V1, 0.94 GB in V4.1. That decides how many conversations fit.
# - One conversation reads mostly weights, many read cache. Experts are shared late.
# - What leaves the cache is lost; the toy does not notice.

# %% [markdown]
# [Technical report](https://arxiv.org/abs/2609.19969): §2.3. Before it: **lesson 00**, the tour. Next: **lesson 02**,
# how near tokens cost a constant.

# %% [markdown]
# ## 中文小结
#
# 1. 词元的键和值以后不再变，存下来即可：每个新词元只算一次，答案不变，要算的词元总数由平方变线性。
# 2. 预填充一次读权重、算很多词元，受算力限制；解码每步一个词元，受读内存限制。
# 3. 一百万词元的缓存：第一代 408 GB，V4.1 只要 0.94 GB，能放下多少对话由此决定。
# 4. 单个对话主要读权重，对话多了才主要读缓存；混合专家要到很多对话才真正共享权重。
# 5. 丢掉最旧的缓存，答案降到瞎猜水平，模型却几乎一样自信。
