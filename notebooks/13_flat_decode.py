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
# # What does the millionth token cost?
#
# **Lesson 13, the flat decode curve.** 25 minutes to read, about a minute to run on one CPU thread, no GPU. It needs
# lesson 00, lesson 04 and lesson 05. Nothing is trained.
#
# Afterwards you can
# 1. count by hand which rows one new token touches, and turn them into work;
# 2. say which part of that work grows with the context, where, and how much;
# 3. keep apart what is *derived*, *counted* and *timed*.

# %%
from bisect import bisect_left

import torch

import tinyds41 as ds
from tinyds41.bench.flat import bench_flat
from tinyds41.bench.measure import gemm_rate, table
from tinyds41.cost.counted import counted_work, narrowed, one_step
from tinyds41.cost.flops import ACCOUNTINGS, decode_cost, flops_per_row
from tinyds41.cost.generations import GENERATIONS
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.rows import attended_rows, scored_entries
from tinyds41.cost.traffic import DecodeTraffic, generation_bytes
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_13 import check_attended, check_crossover, check_flatter
from tinyds41.show.generation_plots import plot_work_by_generation
from tinyds41.show.growth_plots import plot_growth, plot_rows_by_layer

torch.set_num_threads(1)
_ = torch.manual_seed(0)  # for the random weights; no count below depends on them

# %% [markdown]
# ## Feel the problem
#
# To *decode* is to write one token after another. Each new token looks back at all before it; the *context* is how many
# tokens there are, the new one included.
#
# Work is counted in *FLOPs*, here multiply-adds times two. In DeepSeek-V3 every layer attends to every earlier token.

# %% tags=["nbval-check-output"]
short, long = 2**12, 2**20
old = GENERATIONS["V3"].decode_cost()
for context in (short, long):
    print(f"V3, context {context:>9,}: {old.at(context).total / 1e9:8,.0f} GFLOP for one token")
print(f"the millionth token costs {old.growth(short, long):.0f} times as much")
assert 124 < old.growth(short, long) < 125

# %% [markdown]
# (V3 was not made for a million tokens; the formula goes on all the same.)
#
# > **Popular accounts** say of V4.1-Flash: a token costs the same at any length, be it four thousand or a million.
#
# **Guess first:** how many times as much does the millionth token of V4.1-Flash cost? (Lesson 00 told; do you
# remember?) And which of its parts grows: the matrices, attention, or the index scores of lesson 05?

# %% [markdown]
# ## One picture
#
# With what came before, a layer can do two things. It *attends*: to its window, and to the rows that were chosen for
# it. And if it is one of the eight layers that choose (lesson 04), it first *scores* index rows, the keys of entries.
#
# Orange bars: rows scored at a million tokens. Black marks: at 4,096. Blue dots: rows attended to, the same at both.

# %%
flash = ds.Config.preset("flash")
scored = {n: {**scored_entries(flash, n)[0], **scored_entries(flash, n)[1]} for n in (short, long)}
ax = plot_rows_by_layer(scored, attended_rows(flash, long), model="flash")
assert attended_rows(flash, long) == attended_rows(flash, short)
grows = [layer for layer in scored[long] if scored[long][layer] == 256 * scored[short][layer]]
print(f"layers whose rows grow 256 times, as the context does: {grows}")

# %% [markdown]
# Four of 40 layers, the FULL ones, score everything. Four choose inside the pool. All others score nothing.
#
# ## One equation
#
# Work on one token at a context of $n$:
#
# $$\text{work}(n) = A + a \, R(n) + s \, S(n)$$
#
# $A$: all products with weights. $R(n)$: rows attended to, $a$ FLOPs each. $S(n)$: index rows scored, $s$ FLOPs each.
# For a long context
#
# $$R = 38 \cdot (512 + 128) + 2 \cdot 128, \quad S(n) = (3 \cdot \tfrac12 + 1)\, n + 4 \cdot 16384$$

# %% [markdown]
# $R$ has no $n$ in it: 38 layers attend to 512 chosen rows and a window of 128, two to a window alone. In $S$ three
# FULL layers have an entry per two tokens, one has an entry per token, and four layers score a full pool.
#
# ## Naive version
#
# Plain Python over the plan. An entry stands for `ratio` tokens; a pool is scored in whole blocks.

# %%
def rows_by_hand(config, n):
    """Rows scored and rows fetched for one token, by layer, and the number of rows attended to."""
    scored, fetched, attended = {}, {}, 0
    for layer in config.plan():
        attended += min(n, config.sliding_window)
        if not layer.ratio:
            continue
        entries = n // layer.ratio
        chosen = min(entries, config.index_topk)
        attended += chosen
        if layer.selects:
            if layer.pooled:
                blocks = min(-(-entries // config.candidate_block_size), config.candidate_topk_blocks)
                entries = blocks * config.candidate_block_size
            scored[layer.layer], fetched[layer.layer] = entries, chosen
    return scored, fetched, attended


per_score, per_row = flops_per_row(flash)
assert per_score == 2 * flash.index_n_heads * flash.index_head_dim == 8192
assert 2 * flash.index_n_heads < 0.01 * per_score  # the sum over index heads: small, and left out
assert per_row == 2 * 2 * flash.num_attention_heads * flash.head_dim == 16 * per_score
assert rows_by_hand(flash, long)[2] == 38 * (512 + 128) + 2 * 128
assert sum(rows_by_hand(flash, long)[0].values()) == 2.5 * long + 4 * 16_384

# %% [markdown]
# ## Count it
#
# A formula may forget something. So we *count*: a model with the plan, window, selection and pool of `flash`, but with
# 32 channels. How many rows a token touches does not depend on channels.
#
# Its cache is filled with random rows, as if a million tokens had been read. Then it decodes one token, and the
# operations themselves say what they scored and fetched. One context is odd, so that groups and blocks stay open.

# %% tags=["nbval-check-output"]
contexts = (2**12, 2**14, 2**16, 2**18, 2**20)
few = ds.Model(narrowed(flash)).requires_grad_(False)
counted = {n: one_step(ds.Session(few), n) for n in (12_345, *contexts)}
for n, counters in counted.items():
    by_hand = rows_by_hand(flash, n)
    assert (counters.entries_scored, counters.rows_decoded) == by_hand[:2]
    print(f"context {n:>9,}: {sum(by_hand[0].values()):>9,} rows scored, {sum(by_hand[1].values()):,} fetched")
assert few.config.hidden_size == 32

# %% [markdown]
# Equal in each layer, at each context. Counted rows times the FLOPs of a row at the *released* sizes give counted work.
# It must be the derived work, to the last FLOP:

# %%
cost = decode_cost(flash, "flash")
for n, counters in counted.items():
    for accounting in ACCOUNTINGS:
        mine, derived = counted_work(flash, cost.linear, counters, n, accounting), cost.at(n, accounting)
        assert all(getattr(mine, part) == getattr(derived, part)
                   for part in ("linear", "attention", "index_full", "index_pool", "total"))
    assert cost.at(n).attention == rows_by_hand(flash, n)[2] * per_row
print(f"{len(counted)} contexts, {len(ACCOUNTINGS)} accountings: counted work is derived work")

# %% [markdown]
# Not counted but derived is $A$, the `linear` part: a model of few channels cannot show it.
#
# ## The answer
#
# *Raw* counts every FLOP alike. *Weighted* counts what a chip does faster as less: linear work in FP8 a half, index
# scores in FP4 a quarter, attention in BF16 one. (The report gives the weights, but not what it counts where: that
# reading is ours.)

# %% tags=["nbval-check-output"]
for accounting in ACCOUNTINGS:
    first, last = cost.at(short, accounting), cost.at(long, accounting)
    print(f"{accounting}: GFLOP at {short:,}, at {long:,}, growth")
    for part in ("linear", "attention", "index_pool", "index_full", "total"):
        a, b = getattr(first, part) / 1e9, getattr(last, part) / 1e9
        print(f"  {part:11}{a:7.2f}{b:7.2f}{b / a:8.2f}")
growth = {accounting: round(cost.growth(short, long, accounting), 2) for accounting in ACCOUNTINGS}
assert growth == {"raw": 1.61, "weighted": 1.28}

# %% [markdown]
# > **Correction.** A token does not cost the same at any length. From 4,096 tokens to a million its work grows 1.28
# > times weighted (the report says about a quarter more) and 1.61 times raw.
#
# Attention, the part that everyone suspects, is exactly constant. Matrices too. The pool grows until it is full, by
# next to nothing. All the rest is scans of four layers.
#
# Who says "flat" must say by which accounting.

# %% [markdown]
# ## Guess before running
#
# The scans grow without end, everything else stays. **Guess first:** at which context do index scores outweigh
# everything else together?
#
# The released model stops at 1,048,576 tokens. To look further, we let positions go on.

# %% tags=["nbval-check-output"]
further = decode_cost(flash.replace(max_position_embeddings=2**23), "flash")


def index_leads(n, accounting):
    work = further.at(n, accounting)
    return work.index_full + work.index_pool > work.linear + work.attention


for accounting in ACCOUNTINGS:
    n = 1 + bisect_left(range(1, 2**23), True, key=lambda n: index_leads(n, accounting))
    assert index_leads(n, accounting) and not index_leads(n - 1, accounting) and n > flash.max_position_embeddings
    print(f"{accounting}: from {n:,} tokens on, {n / 1e6:.1f} million")

# %% [markdown]
# **A surprise.** Not within the million that the model can read: at 1.7 million raw, at 3.8 million weighted. Before
# that, most of a token's work is plain products with weights, as in its first sentence. (Exercise 1 asks the same about
# attention alone. There the answer lies well inside.)
#
# ## Beside its ancestors
#
# **Guess first:** is V4.1-Flash also the cheapest at 4,096 tokens?

# %% tags=["nbval-check-output"]
costs = {name: GENERATIONS[name].decode_cost() for name in ("V3.2", "V4-Pro", "V4-Flash", "V4.1-Flash")}
for name, other in costs.items():
    raw, weighted = (other.growth(short, long, accounting) for accounting in ACCOUNTINGS)
    a, b = (other.at(n, "weighted").total / 1e9 for n in (short, long))
    print(f"{name:11}grows {raw:5.2f} raw, {weighted:.2f} weighted: from {a:4.1f} to {b:5.1f} GFLOP weighted")
found = {name: [round(other.growth(short, long, a), 2) for a in ACCOUNTINGS] for name, other in costs.items()}
assert list(found.values()) == [[10.25, 8.07], [2.79, 2.65], [4.89, 3.87], [1.61, 1.28]]

# %%
ax = plot_work_by_generation({name: other.curve(contexts, "weighted") for name, other in costs.items()})
v4, v41 = costs["V4-Flash"], costs["V4.1-Flash"]
assert v41.at(short, "weighted").total > 1.2 * v4.at(short, "weighted").total
assert v4.at(short).linear < v41.at(short).linear
assert v41.at(2**16, "weighted").total > v4.at(2**16, "weighted").total
assert v41.at(2**17, "weighted").total < v4.at(2**17, "weighted").total  # 128K tokens

# %% [markdown]
# **A miss.** At short contexts V4-Flash is cheaper: it uses fewer weights per token. The lines cross between 64K and
# 128K tokens. Flat is not the same as low.
#
# And a smaller growth can have two reasons: scans that cost less, or an $A$ that is larger. V4-Pro, the larger model,
# grows less than V4-Flash and never costs less. (How its layers are divided is assumed, as in lesson 01.) Keep this for
# later.

# %% [markdown]
# ## One knob
#
# Lesson 05 praised the pool. **Guess first:** what does a pool of 64 blocks do to the curve, instead of 2,048? And one
# of 16,384?

# %%
def weighted_work(config, **changes):
    """Weighted work by context under a changed config."""
    return {work.context: work.total for work in decode_cost(config.replace(**changes)).curve(contexts, "weighted")}


pools = {blocks: weighted_work(flash, candidate_topk_blocks=blocks) for blocks in (64, 2048, 16_384, 131_072)}
ax = plot_growth({f"{blocks:,} blocks": work for blocks, work in pools.items()},
                 title="Weighted decode work of flash, by candidate_topk_blocks")
grown = {blocks: work[long] / work[short] for blocks, work in pools.items()}
print("growth by blocks:", {blocks: round(times, 3) for blocks, times in grown.items()})
assert abs(grown[64] - grown[2048]) < 0.01 and grown[131_072] > 1.7

# %% [markdown]
# A pool 32 times smaller changes nothing that one could see; two curves lie on one another. Four scans set the slope,
# and no pool touches them. Too large a pool binds late or never, and the curve rises.
#
# What the plot does not show: what a small pool loses. Lesson 05 measures that.
#
# Other knobs do move the slope:

# %% tags=["nbval-check-output"]
fewer = {"kv_source_layer_ids": [2, 8, 20], "index_source_layer_ids": [2, 8, 20, 24, 28, 32, 36]}
knobs = {
    "as released": {},
    "one FULL layer fewer": fewer,
    "no REINDEX layers": {"index_source_layer_ids": flash.kv_source_layer_ids},
    "ratio 1 everywhere": {"compress_ratios": [0, 0] + [1] * 38},
    "ratio 2 everywhere": {"compress_ratios": [0, 0] + [2] * 38},
}
for name, changes in knobs.items():
    changed = decode_cost(flash.replace(**changes))
    print(f"{name:21} grows {changed.growth(short, long, 'weighted'):.3f} weighted,"
          f" {float(kv_bytes(changed.config).bytes_per_token):6,.0f} cache bytes per token")

# %% [markdown]
# Fewer entries to scan flatten the curve, and they are fewer bytes too. The four REINDEX layers cost next to nothing:
# that is the pool's doing.
#
# ## Take it away
#
# Now without the pool; and without sharing, so that each of the 38 readers chooses for itself. **Guess first:** which
# of the two hurts more? Counted at 262,144 tokens, derived up to a million:

# %% tags=["nbval-check-output"]
free = flash.replace(candidate_source_layer_id=None, candidate_topk_blocks=0)
readers = [layer.layer for layer in flash.plan() if layer.ratio]
ablated = {"released": flash, "no pool": free, "no sharing": flash.replace(index_source_layer_ids=readers),
           "neither": free.replace(index_source_layer_ids=readers)}
grown = {}
for name, config in ablated.items():
    other, session, n = decode_cost(config), ds.Session(ds.Model(narrowed(config)).requires_grad_(False)), 2**18
    counters = one_step(session, n)
    assert counters.entries_scored == rows_by_hand(config, n)[0]
    assert counted_work(config, other.linear, counters, n).total == other.at(n).total
    raw, grown[name] = (other.growth(short, long, accounting) for accounting in ACCOUNTINGS)
    rows = sum(rows_by_hand(config, long)[0].values())
    print(f"{name:11}{rows:>11,} rows scored at a million: growth {raw:.2f} raw, {grown[name]:.2f} weighted")
assert n == 262_144 and grown["no pool"] > 1.7 and grown["no sharing"] > 2 and grown["neither"] > 4

# %%
ax = plot_growth({name: weighted_work(config) for name, config in ablated.items()},
                 title="Weighted decode work of flash, with parts taken away")

# %% [markdown]
# **It hurts.** Without the pool 1.28 becomes 1.72; without sharing more than two; without both more than four. Sharing
# the choice flattens more than the pool. (That a Full layer's entries are shared too saves bytes, no decode work.)

# %% [markdown]
# ## Time it
#
# FLOPs are not seconds. `small` is a preset that this machine can run: 12 layers, two of them FULL, two in a pool.
#
# **Guess first:** it has the same kind of schedule. So from 4,096 tokens to a million its work grows 1.61 times raw,
# too? Or less, or more?

# %% tags=["nbval-check-output"]
small = ds.Config.preset("small", engram_layer_ids=[], engram_num_embeddings=[], max_position_embeddings=2**21)
tiny = decode_cost(small, "small")
session = ds.Session(ds.Model(small).requires_grad_(False))
kinds = [(layer.mode == "FULL", layer.selects and layer.pooled) for layer in small.plan()]
assert (len(kinds), *map(sum, zip(*kinds, strict=True))) == (12, 2, 2)
assert counted_work(small, tiny.linear, one_step(session, 2**16), 2**16).total == tiny.at(2**16).total
for other in (cost, tiny):
    first, last = (other.at(n).index_full / 1e6 for n in (short, long))
    print(f"{other.name}: grows {other.growth(short, long):5.2f} times raw;"
          f" linear work {other.linear / 1e6:8,.1f} MFLOP, scans {first:5.1f} to {last:8,.1f}")
matrices, scans = cost.linear / tiny.linear, cost.at(long).index_full / tiny.at(long).index_full
print(f"flash over small: linear work {matrices:,.0f} times, scans {scans:.1f} times")
assert tiny.growth(short, long) > 50 and matrices > 1000 and scans < 15

# %% [markdown]
# **The surprise of this lesson.** About fifty times. The schedule is the same, but flatness is a *ratio*: of scans to
# everything else. The matrices of `small` are over a thousand times less work than those of `flash`, its scans only a
# dozen times less. So scans rule it, and the curve is steep.
#
# `flash` is flat because it scans little, *and* because its constant part is large.
#
# **Guess first:** how many times longer does a token of `small` then take?

# %%
# NBVAL_IGNORE_OUTPUT
timed = bench_flat(rounds=2, contexts=(2**12, 2**16, 2**18, 2**20))
print(table(timed["rows"]))  # counts and GFLOP are of flash, only milliseconds of small
milliseconds = {row["context"]: row["small_ms_per_token"] for row in timed["rows"]}
rates = [tiny.at(n).total / milliseconds[n] / 1e6 for n in (short, long)]
print("GFLOP/s: {:.1f} at 4,096, {:.1f} at a million; a large product {:.1f}".format(*rates, gemm_rate() / 1e9))
curves = {"small, derived": {n: tiny.at(n).total for n in milliseconds}, "small, timed": milliseconds,
          "flash, derived": {n: cost.at(n).total for n in milliseconds}}
ax = plot_growth(curves, title="Raw work, and milliseconds of one run on this CPU", log=True)

# %% [markdown]
# (In the table, counts and GFLOP are those of `flash`; only the milliseconds are of `small`.)
#
# Less than its work grows. At 4,096 tokens the rate is far below that of a large product. A likely reason: time goes
# into reading weights and starting hundreds of small operations. That part does not grow, and it hides the FLOPs.
#
# Run the cell again on a busy machine: the times change. Counts never do.

# %% [markdown]
# So the timing shows that long contexts *run*, and that scans in the end dominate a small model. It does **not** show
# the curve of `flash`: neither its large matrices nor 4-bit arithmetic. A flat timing of a small model would prove as
# little as this steep one.

# %% [markdown]
# ## What it reads
#
# A chip that decodes waits for memory more than for arithmetic. So count *bytes read* for one token: weights that it
# meets, rows attended to, index keys scanned.
#
# **Guess first:** work grows 1.28 times. And the bytes read from the cache?

# %% tags=["nbval-check-output"]
traffic = DecodeTraffic(flash, "flash")
print("MB read:      context   windows   entries      keys     cache   weights")
for n in (2**12, 2**16, 2**20):
    read = traffic.at(n)
    parts = (read.window_rows, read.global_rows, read.index_keys, read.cache, read.weights)
    print(f"         {n:>12,}" + "".join(f"{part / 1e6:10,.1f}" for part in parts))
first, last = traffic.at(short), traffic.at(long)
print(f"cache {last.cache / first.cache:.1f} times, with weights {last.total / first.total:.3f} times")
assert round(last.cache / first.cache, 1) == 18.9 and round(last.total / first.total, 3) == 1.014

# %% [markdown]
# **Two more answers to one question.** Reads of the cache grow 18.9 times. With weights, for one text alone, all
# reads grow by a percent and a half.
#
# In a batch, weights are read once for all its texts, rows for each. **Guess first:** how many texts of a million
# tokens does it take until as much is read of caches as of one token's weights?

# %% tags=["nbval-check-output"]
for n in (short, long):
    print(f"context {n:>9,}: {first.weights / traffic.at(n).cache:7,.1f} texts")
for name in ("V3", "V3.2", "V4-Flash", "V4.1-Flash"):
    a, b = (generation_bytes(GENERATIONS[name], n).cache for n in (short, long))
    print(f"{name:11}reads {a / 1e6:6.1f} MB of cache at 4,096, {b / 1e6:8,.1f} at a million: {b / a:5.1f} times")
per_token = kv_bytes(flash).bytes_per_token
print(f"stored: {per_token} bytes per token; read at a million: {last.cache / long:.0f} per token of context")
assert last.cache / long < 0.25 * per_token
assert min(generation_bytes(other, long).cache for other in GENERATIONS.values()) == last.cache

# %% [markdown]
# At a million tokens some dozens of texts are enough. (A batch meets more experts than one token, so in truth it takes
# more.) On a busy server the flat curve is a curve of arithmetic; traffic is steeper.
#
# Still, what is read is a fifth of what is stored, and it is less than in any generation before.

# %% [markdown]
# ## What is left out
#
# Choosing the best 512 of a row of scores takes comparisons, no FLOPs: at least one for every row scored, so it grows
# just as scans do. The sum over index heads adds less than a hundredth of the scores. Norms, softmax, rotation and the
# mixing of streams are left out too; they do not depend on the context.
#
# *Derived* work is exact and knows no chip. *Counted* work tests its row counts. *Timed* work is real, for one model on
# one machine.

# %% [markdown]
# ## Exercise 1
#
# From which context on are index scores of `flash` at least as much raw work as attention? An exact number of tokens.
#
# <details><summary>Hint</summary>
#
# The equation: $a R = s\,S(n)$, and $a$ is 16 times $s$.
#
# </details>

# %%
crossover = ...
check_crossover(crossover)

# %% [markdown]
# ## Exercise 2
#
# How many rows do all layers of `flash` together attend to, for one token at a context of $n$? Write it as a function,
# also right for short contexts.
#
# <details><summary>Hint</summary>
#
# Each layer has a window. Of the 38 readers 18 have ratio 2, the others ratio 1.
#
# </details>

# %%
attended = ...  # such as: lambda n: 40 * n
check_attended(attended)

# %% [markdown]
# ## Exercise 3
#
# Make `flash` flatter: weighted growth below 1.2. You may change `kv_source_layer_ids` and `index_source_layer_ids`,
# nothing else. What your model loses, no count of FLOPs can say.
#
# <details><summary>Hint</summary>
#
# "One FULL layer fewer" above was a start. Mind that each KV source is an index source.
#
# </details>

# %%
sources = ...  # such as: {"kv_source_layer_ids": [2, 8, 14, 20]}
check_flatter(sources)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded in JupyterLab. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
n = (16 * rows_by_hand(flash, long)[2] - 4 * 16_384) / 2.5
check_crossover(int(n))
check_attended(lambda n: 40 * min(n, 128) + 18 * min(n // 2, 512) + 20 * min(n, 512))
check_flatter({"kv_source_layer_ids": [2, 20], "index_source_layer_ids": [2, 20, 24, 28, 32, 36]})
assert refuses(check_crossover, long) and refuses(check_attended, lambda n: 38 * 640 + 2 * 128)
assert refuses(check_flatter, fewer)

# %% [markdown]
# ## Recap
#
# - From 4,096 tokens to a million, work on one token grows 1.28 times weighted, 1.61 times raw: scans of four layers.
#   Attention does not grow at all.
# - Sharing the choice flattens most, then the pool. A smaller pool flattens no further.
# - Flatness is a ratio. The same kind of schedule in a small model is steep.
# - Reads of the cache grow 18.9 times; what that means depends on the batch.
#
# [Technical report](https://arxiv.org/abs/2609.19969): §2.3. Before it: **lesson 01**, the cache, and
# **lesson 05**, the indexer and the pool.

# %% [markdown]
# ## 中文小结
#
# 1. 上下文从 4,096 增到一百万，每个新词元的计算量加权增长到 1.28 倍，按原始运算量是 1.61 倍：并不是完全不变。
# 2. 注意力的计算量不变；增长的只有四个 Full 层对全部条目的打分。
# 3. 去掉候选池，加权增长为 1.72 倍；去掉共享选择，超过两倍；两样都去掉，超过四倍。
# 4. “平”是一个比值：同样的层安排放进小模型，曲线就很陡。
# 5. 读取缓存的字节数增长到 18.9 倍；推导、计数、计时是三种不同的证据。
