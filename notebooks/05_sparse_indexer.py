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
# # How does a token find its few rows among a million?
#
# **Lesson 05, the sparse indexer and the candidate pool.** 30 minutes to read, about a minute to run on one CPU
# thread, no GPU.
#
# Afterwards you can
# 1. compute an index score by hand, and count what scoring costs;
# 2. say what the pool saves, from which context on, and which layers still look at every entry;
# 3. measure what a choice and a pool lose, and what that does to answers.

# %%
import math

import torch

import tinyds41 as ds
from tinyds41 import ops
from tinyds41.cost.flops import ACCOUNTINGS, decode_cost
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.rows import pool_shares, scored_entries
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_05 import check_binds, check_pool, check_scored
from tinyds41.formats import Rows
from tinyds41.show.explore_pool import explore_pool
from tinyds41.show.generation_plots import plot_work_by_component
from tinyds41.show.index_observations import candidates
from tinyds41.show.index_plots import plot_candidates
from tinyds41.show.run_plots import LossPoint, plot_loss
from tinyds41.show.setting_plots import plot_quality_by_setting
from tinyds41.train.examples import example_record
from tinyds41.train.tasks import Needle, answers, needle_config, share

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run
_ = torch.manual_seed(0)

# %% [markdown]
# ## Feel the problem
#
# Picture a desk and a cellar. On the desk lie the last pages, the *window*. The cellar holds *entries*, each a note on
# one token or two of all that was read. For each new token a layer may fetch a few hundred.
#
# Which ones? An *indexer* scores every entry, with far fewer multiplications than attending takes.
#
# **Guess first:** at a million tokens, what is more work: one layer that scores every entry, or attention to the
# fetched ones in *all* layers?

# %% tags=["nbval-check-output"]
flash, context = ds.Config.preset("flash"), 2**20
per_score = 2 * flash.index_n_heads * flash.index_head_dim  # FLOPs: a multiply-add is 2; a dot product per index head
per_row = 2 * 2 * flash.num_attention_heads * flash.head_dim  # a score and a weighted sum per head
print(f"fetched {flash.index_topk}; FLOPs to attend to a row {per_row:,}, to score an entry {per_score:,}")
for name, rates in ACCOUNTINGS.items():
    scan, work = rates.index * context * per_score, decode_cost(flash).at(context, name)
    print(f"{name:8} one scan {scan / 1e9:.2f} GFLOP, attention in all layers {work.attention / 1e9:.2f}: "
          f"{scan / work.attention:.2f} times")
assert per_row == 16 * per_score and flash.index_topk == 512

# %% [markdown]
# *Raw* counts every multiply-add alike: one scan is more than twice all attention. *Weighted* counts 4-bit scores at a
# quarter, and one scan still is two thirds.
#
# So the released model scans rarely. FULL layers write entries and choose among them. REINDEX layers choose afresh
# among these. REUSE layers follow the latest choice, SWA layers have a window alone. And some may choose only inside a
# **candidate pool**.

# %% tags=["nbval-check-output"]
plan = flash.plan()
for mode in ("FULL", "REINDEX", "REUSE", "SWA"):
    layers = {layer.layer: layer.ratio for layer in plan if layer.mode == mode}
    print(f"{mode:8}{len(layers):3} layers", f"(layer: tokens per entry) {layers}" if 2 < len(layers) < 9 else "")
pooled = [layer.layer for layer in plan if layer.pooled and layer.selects]
print(f"layer {flash.candidate_source_layer_id} forms the pool; {pooled} choose inside it")
assert len(pooled) == 4 and sum(layer.selects for layer in plan) == 8

# %% [markdown]
# ## One equation
#
# A query has $I$ small heads. The score of entry $j$ for the token at position $p$ is
#
# $$\text{score}(p, j) = \frac{1}{\sqrt{I J}} \sum_{i=1}^{I} w_{p,i} \,\max(0,\; q_{p,i} \cdot k_j)$$
#
# Queries $q$ and weights $w$ are learned projections of the token's hidden state, the index key $k_j$ of $J$ numbers
# one of the entry's. A head whose dot product is negative adds nothing, so it cannot cancel what another head found. A
# weight may be negative. The root only keeps scores small.

# %% [markdown]
# No softmax: only the *order* counts. The best $K$ entries are fetched, of equal ones the earlier. An entry has a
# score once its last token has come.
#
# A **pool** cuts the entries into blocks, gives each block the score of its best entry, and keeps the best blocks. The
# newest block always stays and counts among them: it may be partly full, so its best score says little yet. (That
# reason is ours.)
#
# ## Naive version
#
# Plain Python, one entry at a time. We leave out rotation and 4-bit rounding.

# %%
def score(queries, weights, key):
    """The equation, one head after another."""
    heads, channels = queries.shape
    dots = [max(0.0, float(query @ key)) for query in queries]
    return sum(float(w) * dot for w, dot in zip(weights, dots, strict=True)) / math.sqrt(heads * channels)


def best(scores, k):
    """Places of the k highest, of equal ones the lower; in ascending order."""
    return sorted(sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:k])


def pool_of(scores, size, n_blocks):
    """The best blocks by their best entry; the newest is always in."""
    blocks = [max(scores[start : start + size]) for start in range(0, len(scores), size)]
    blocks[-1] = math.inf
    return best(blocks, n_blocks)


def choose(scores, size, pool, k):
    """The k best entries of a later layer, which may only look inside the pool; fewer where that holds fewer."""
    inside = [place for place in range(len(scores)) if place // size in pool]
    return [inside[i] for i in best([scores[place] for place in inside], k)]

# %% [markdown]
# Does the library do the same? Two layers with random queries: the first forms a pool of blocks of four, the second
# chooses 5 of 45 entries inside it. Once the pool has three blocks, once a single one, which is then the newest.

# %%
n, size, k = 45, 4, 5
queries, weights, keys = torch.randn(2, 3, 8).double(), torch.randn(2, 3).double(), torch.randn(n, 8).double()
first, second = ([score(q, w, key) for key in keys] for q, w in zip(queries, weights, strict=True))
seen = {"first": torch.tensor([[0]]), "last": torch.tensor([[n]]), "k": k, "block_size": size}  # entries 0 to n - 1
(q1, q2), (w1, w2), store = queries[:, None, None], weights[:, None, None], Rows(keys[None])
for blocks in (3, 1):
    chosen, pool = ops.score_and_select(q1, w1, store, **seen, form_blocks=blocks)
    later, _ = ops.score_and_select(q2, w2, store, **seen, pool=pool)
    mine = pool_of(first, size, blocks)
    print("pool", mine, "first layer", best(first, k), "second layer", choose(second, size, mine, k))
    assert pool.flatten().tolist() == mine and chosen.flatten().tolist() == best(first, k)
    assert [entry for entry in later.flatten().tolist() if entry >= 0] == choose(second, size, mine, k)  # -1: none
assert choose(second, size, mine, k) != best(second, k)  # free, it would have chosen otherwise

# %% [markdown]
# Equal, place by place. The pool takes something away; here by construction, for the layers ask for unrelated things.
# What does that cost in a trained model?

# %% [markdown]
# ## A task with known answers
#
# A row holds eight facts, a *name* and its *value*, between fillers (dots), and ends with eight questions: each name
# again. The answer is the value. Names meet new values in every row, so weights cannot know the answer: it must be
# fetched. A fact stands at an even position, so that an entry of two tokens holds all of it.

# %% tags=["nbval-check-output"]
task = Needle(n_facts=8, n_keys=16, n_values=16, n_fillers=16)
words = ["-"] * 4 + [f"N{i}" for i in range(16)] + [f"v{i}" for i in range(16)] + ["."] * 16
ids, _, wanted = task.batch(step=0, batch_size=1, length=48, seed=3)
print(" ".join(words[i] for i in ids[0, :-1]))
print("answers:", " ".join(words[i] for i in wanted[0, -task.n_facts :]))
assert (ids[0, task.places(ids[:, :-1])[0]] == ids[0, -9:-1]).all()

# %% [markdown]
# ## Train a tiny one
#
# Four layers: two with windows of eight tokens; one that writes an entry per two tokens, scores all of them, and forms
# the pool; and one that chooses inside it. Each of these two fetches 16 entries; the pool has eight blocks of four. (In
# `flash` a layer of ratio 1 forms the pool; ratio 2 makes our facts single entries.)
#
# The questions fill the last eight tokens: the whole window, and the newest block. No answer can come from there.

# %%
toy, model, record = needle_config(task), ds.example("needle"), example_record("needle")
assert model.config == toy
print(toy.plan())
print(record["command"])

# %% [markdown]
# An indexer gets no gradient from the loss, since choosing has none. It learns by *imitation*: to give each entry the
# share of attention that it would receive if attention saw all of them.
#
# So it learns on rows of 32 tokens first. Those are 16 entries, everything is fetched, and the indexer can do no harm.
# This part was trained before, by the command printed above; its losses are on record. Here we train the rest: a few
# steps on rows of 256 tokens, where it has to choose.

# %%
before = record["losses"]
long = ds.train(model, task, steps=40, batch_size=4, length=256, seed=0, learning_rate=3e-3)
points = [LossPoint(step, "train", loss) for step, loss in enumerate(before + long.losses, 1)]
ax = plot_loss(points, model="the toy; 32 tokens a row, after step 260 256", vocab_size=task.n_values)
assert len(before) == 260 and sum(before[-10:]) / 10 < 0.2

# %% [markdown]
# The dashed line is a blind guess among 16 values. Slowly it learns to say a value that stands in the row; then, within
# some dozens of steps, to look up the right one. The bump is the change to longer rows.
#
# **Guess first:** it never saw more than 256 tokens. How many questions does it answer in rows of 512? Of 2,048?

# %%
by_length = {length: answers(model, task, length=length, n_rows=24) for length in (32, 256, 512, 2048)}
for length, found in by_length.items():
    print(f"{length:5} tokens, {length // 2:5} entries: {found.accuracy:.3f} right, {1 / task.n_values:.3f} by chance")
assert by_length[32].accuracy > 0.9 and by_length[512].accuracy > 0.85
assert by_length[2048].accuracy < by_length[512].accuracy

# %% [markdown]
# Twice its longest row costs it next to nothing, eight times that length a good part. We come back to where those
# answers went.

# %% [markdown]
# ## What the indexer saw
#
# The last question of one row. A bar is a block of four entries, as high as its best score. Blue blocks are in the
# pool; the hatched orange one is the newest. Black marks are the entries that layer 2 fetched.

# %%
length, layer = 256, toy.candidate_source_layer_id
ids = task.batch(step=0, batch_size=1, length=length, seed=1).ids[:, :-1]
trace = ds.Trace("layers.*.indexer.*")
with torch.no_grad():
    model(ids, trace=trace)
place = int(task.places(ids)[0, -1])
seen = candidates(trace, toy, length - 1)
ax = plot_candidates(seen, model="the toy", marked={place: "the fact"})
print(f"the fact stands at token {place}: entry {place // 2}, block {place // 8}; fetched: {seen[place // 2].selected}")

# %% [markdown]
# The other high blocks hold other facts: the indexer finds *facts*, and the one that is asked for best of all.
#
# In a live notebook the next cell has sliders: other queries, pools, selections, and the layer behind the pool.

# %%
# NBVAL_IGNORE_OUTPUT
explore_pool(model, ids, name="the toy")

# %% [markdown]
# The naive version, on the queries and keys of that very run:

# %%
q, w, keys = (trace[f"layers.{layer}.indexer.{part}"][0] for part in ("queries", "weights", "keys"))
scores = trace[f"layers.{layer}.indexer.scores"][0, length - 1]
naive = torch.tensor([score(q[-1], w[-1], key) for key in keys])
print(f"{len(naive)} scores up to {naive.max():.1f}; weights of heads {w[-1].min():.1f} to {w[-1].max():.1f}")
assert torch.allclose(naive, scores, atol=1e-4)  # float32 sums of a few dozen products, in another order
in_pool = {one.block for one in seen if one.in_pool}
assert len(in_pool) == toy.candidate_topk_blocks and {one.block for one in seen if one.newest} <= in_pool

# %% [markdown]
# ## Guess before running
#
# Rows of 512 tokens, 256 entries in 64 blocks. We change two numbers of the *trained* toy, one at a time:
#
# - `index_topk`, how many entries each layer fetches: 16, down to one;
# - `candidate_topk_blocks`, how many blocks the pool has: from all 64 down to one.
#
# Draw two curves for each: how often the fact is fetched, or in the pool; and how often the answer is right.

# %%
def ask(asked=model, **changes):
    """A toy under a changed config, on rows of 512 tokens."""
    return answers(ds.variant(asked, **changes), task, length=512, n_rows=24)


by_k = {k: ask(index_topk=k) for k in (1, 4)} | {16: by_length[512]}
curves = {"answer right": {k: found.accuracy for k, found in by_k.items()}}
for source in (2, 3):
    curves[f"fetched by layer {source}"] = {k: share(found.chosen[source]) for k, found in by_k.items()}
ax = plot_quality_by_setting(curves, setting="index_topk", trained=16, model="the toy")
assert by_k[1].accuracy > 0.7 and share(by_k[1].chosen[3]) < share(by_k[16].chosen[3])

# %% [markdown]
# One entry of 256 is nearly enough. Layer 3 then often fetches another one, but the answer is there all the same.
#
# Now the pool.

# %%
by_blocks = {n: by_length[512] if n == 8 else ask(candidate_topk_blocks=n) for n in (1, 2, 4, 8, 64)}
curves = {
    "answer right": {blocks: found.accuracy for blocks, found in by_blocks.items()},
    "fact in the pool": {blocks: share(found.pooled) for blocks, found in by_blocks.items()},
}
ax = plot_quality_by_setting(curves, setting="candidate_topk_blocks", trained=8, model="the toy")
assert share(by_blocks[1].pooled) == 0 and by_blocks[1].accuracy > 0.7

# %% [markdown]
# **The surprise.** A pool of one block is the newest block: it holds questions, and *every* fact is lost from it. Yet
# most answers survive. How?

# %%
one = by_blocks[1]
for source in (2, 3):
    print(f"one block: the fact is fetched by layer {source} in {share(one.chosen[source]):.3f} of cases")
print(f"wrong answers: {int((~one.right).sum())}, and {int((~by_blocks[8].right).sum())} with eight blocks,"
      f" of {one.right.numel()}")
assert share(one.chosen[2]) > 0.9 and share(one.chosen[3]) == 0

# %% [markdown]
# The layer that forms the pool is not bound by it. It had scored everything, fetched the fact, and written it into the
# token's hidden state. (That is why some black marks above stood on grey.) Only the layers behind are bound. A lost
# entry is not a lost answer, though it costs some.
#
# What the curve does not show: tasks where a later layer needs an entry that the first had no reason to want. There,
# what the pool drops is gone.

# %% [markdown]
# ## Hits and misses
#
# In rows of 2,048 tokens the toy fails at many questions.
#
# **Guess first:** who is to blame? The indexer, which had to find 1 entry among 1,024? Or what comes after, which got
# 16 of them and had to use the right one?

# %%
found = by_length[2048]
fetched, right = found.chosen[2], found.right
for name, mask in (("fetched", fetched), ("not fetched", ~fetched)):
    print(f"fact {name:11}: {int((mask & right).sum()):3} right, {int((mask & ~right).sum()):3} wrong")
values = found.ids.gather(1, found.places + 1)
other = (found.said.unsqueeze(-1) == values.unsqueeze(1)).any(-1) & ~right
print(f"{int(other.sum())} of the wrong answers name the value of another fact of the row")
print(f"fact in the pool {share(found.pooled):.3f}, fetched by layer 3 {share(found.chosen[3]):.3f}")
assert share(fetched) > 0.9 and share(fetched[~right]) > 0.5

# %% [markdown]
# The facts were fetched, from rows eight times as long as any taught, and the answers are wrong all the same. So the
# fault lies behind the fetching: many answers name a neighbour's value. Whether attention mixes them up or a later
# layer does, this table cannot say.
#
# Nor does it prove that an indexer is always the better part: our fillers are easy to tell from facts.

# %% [markdown]
# ## Take the training away
#
# The same trained toy, but its indexers are set back to their first, random weights. Attention stays as it is.
#
# **Guess first:** which part of the answers is left in rows of 512 tokens? And does a larger pool help?

# %%
fresh, trained = ds.Model(toy, seed=0).state_dict(), model.state_dict()
mixed = {name: fresh[name] if ".indexer." in name else trained[name] for name in trained}
untaught = ds.Model(toy, seed=0)
untaught.load_state_dict(mixed)
for length in (32, 256, 512):
    left = answers(untaught, task, length=length, n_rows=24)
    print(f"{length:4} tokens: taught {by_length[length].accuracy:.3f}, untaught {left.accuracy:.3f}")
assert left.accuracy < 0.5 * by_length[512].accuracy

# %%
blind = {n: left if n == 8 else ask(untaught, candidate_topk_blocks=n) for n in (1, 8, 64)}
curves = {
    "answer right": {blocks: found.accuracy for blocks, found in blind.items()},
    "fact in the pool": {blocks: share(found.pooled) for blocks, found in blind.items()},
    "fetched by layer 3": {blocks: share(found.chosen[3]) for blocks, found in blind.items()},
}
ax = plot_quality_by_setting(curves, setting="candidate_topk_blocks", trained=8, model="the untaught toy")
assert blind[64].accuracy < 0.6 and share(blind[64].pooled) == 1 > share(blind[8].pooled)

# %% [markdown]
# **It hurts.** At 32 tokens nothing is lost, for everything is fetched. At 512 most answers are gone, though attention
# was not touched: it cannot read what nobody brings up from the cellar.
#
# A wide pool does not help an indexer that ranks badly. With all 64 blocks every fact is in the pool, and layer 3 still
# fetches few of them.
#
# How much of attention does the *taught* indexer keep?

# %%
recall = long.records[-1]["recall"]
for source, kept in recall.items():
    print(f"layer {source}: {kept['selection']:.2f} of attention's mass is fetched, {kept['pool']:.2f} in the pool;"
          f" answers right at 256 tokens {by_length[256].accuracy:.2f}")
assert all(0.2 < kept["selection"] < 0.95 for kept in recall.values()) and by_length[256].accuracy > 0.9

# %% [markdown]
# **A miss.** A good part of what attention would have looked at, had it seen everything, is never fetched, and the
# answers are right all the same. Recall of mass is easy to report and a poor judge of what matters.
#
# > **Measured.** Popular accounts say that training makes the pool accurate enough. Here, for finding facts among
# fillers, it does; untrained it does not. Another task may need what this one can spare.

# %% [markdown]
# ## What it costs, and what it saves
#
# Back to the released sizes. The pool itself costs no bytes: it is formed anew for every token. Index keys do.
#
# **Guess first:** four of the eight layers that choose are bound to the pool. At a context of 8,192 tokens, how much
# of the index work does the pool save? And at a million?

# %% tags=["nbval-check-output"]
cache = kv_bytes(flash)
key, row = (cache.of(store)[0].row_bytes for store in ("index keys", "global KV"))
print(f"bytes of an entry: {row} to attend to, {key} to find it by")
for context in (2**12, 2**13, 2**14, 2**16, 2**18, 2**20):
    full, pool = (sum(rows.values()) for rows in scored_entries(flash, context))
    saved = 1 - (full + pool) / (full + len(pooled) * context)  # the bound layers would scan all, were they free
    print(f"{context:>9,}: {full:>9,} scanned + {pool:>6,} in pools; saved {saved:4.0%}, "
          f"a pool holds {pool_shares(flash, context)[0]:6.1%}")
assert (key, row) == (68, 288) and full == 2.5 * context and 0.6 < saved < 0.62

# %% [markdown]
# Nothing at all while the pool still holds everything. At a million it saves three fifths: 16,384 positions are left of
# a million, and no layer behind may look elsewhere. Scanned are 2.5 entries per token: three layers of ratio 2, one of
# ratio 1.

# %%
contexts = (2**12, 2**14, 2**16, 2**18, 2**20)
cost = decode_cost(flash, "flash")
ax = plot_work_by_component([cost.at(context, "weighted") for context in contexts])
for name in ACCOUNTINGS:
    work = cost.at(2**20, name)
    print(f"{name:8} growth from 4,096 to a million {cost.growth(2**12, 2**20, name):.2f}; there, full scans are"
          f" {work.index_full / (work.index_full + work.index_pool):.1%} of index work,"
          f" {work.index_full / work.total:.0%} of all")
assert round(cost.growth(2**12, 2**20, "raw"), 2) == 1.61 and round(cost.growth(2**12, 2**20, "weighted"), 2) == 1.28

# %% [markdown]
# > **Correction.** Popular accounts say that a token costs the same at any length. From 4,096 tokens to a million it
# grows 1.28 times weighted, 1.61 times raw. Flat are the layers bound to the pool; the four that scan grow.

# %% [markdown]
# ## Exercise 1
#
# `flash` gets blocks of 16 entries instead of 8, and 900 of them instead of 2,048. What is then the longest context at
# which its pool still holds every entry?
#
# <details><summary>Hint</summary>
#
# The layer that forms the pool has ratio 1. A pool has whole blocks; what is the largest number of entries in 900 of
# them?
#
# </details>

# %%
longest = ...
check_binds(longest)

# %% [markdown]
# ## Exercise 2
#
# Blocks scored by the *sum* of their entries would be another design. Write it: from the scores of the visible entries,
# a block size and a number of blocks, the list of kept blocks, ascending. Of equal blocks the lower number wins, and
# the newest block always stays.
#
# <details><summary>Hint</summary>
#
# `pool_of` above needs one change. Mind a last block that is not full.
#
# </details>

# %%
pool_by_sum = ...  # such as: lambda scores, size, n_blocks: [0]
check_pool(pool_by_sum)

# %% [markdown]
# ## Exercise 3
#
# How many index rows do all layers of `flash` together score for one token at a context of $n$? Write it as a
# function. A pool is scored in whole blocks, also where its newest block is not full.
#
# <details><summary>Hint</summary>
#
# The list of layers at the top: which FULL layers have ratio 2, which ratio 1, and how many choose inside the pool?
#
# </details>

# %%
rows_scored = ...  # such as: lambda n: 8 * n
check_scored(rows_scored)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
def by_sum(scores, size, n_blocks):
    blocks = [sum(scores[start : start + size]) for start in range(0, len(scores), size)]
    blocks[-1] = math.inf
    return best(blocks, n_blocks)


check_binds(900 * 16)
check_pool(by_sum)
check_scored(lambda n: 3 * (n // 2) + n + 4 * 8 * min(2048, -(-n // 8)))
assert refuses(check_binds, 2048 * 8) and refuses(check_pool, pool_of) and refuses(check_scored, lambda n: 8 * n)

# %% [markdown]
# ## Recap
#
# - A score takes a sixteenth of the multiplications of attending to a row; a million of them are 2.67 times all
#   attention raw, 0.67 times weighted.
# - The pool keeps the best blocks and the newest one. It saves nothing until it is full, and three fifths of index work
#   at a million tokens.
# - The layer that forms the pool is not bound by it: a fact that the pool loses may be answered all the same.
# - An indexer learns by imitation. Untaught, it takes most answers with it.

# %% [markdown]
# [Technical report](https://arxiv.org/abs/2609.19969): §2.3. Before it: **lesson 04**, who writes and who reads. Next:
# **lesson 06**, four bits a number.

# %% [markdown]
# ## 中文小结
#
# 1. 给一个条目打分的乘法次数只有注意力的十六分之一；一百万次打分按原始运算量是全部注意力的 2.67 倍，加权为 0.67 倍。
# 2. 候选池保留得分最高的块和最新的块；池后的层只在池中挑选。
# 3. 候选池装满之前什么也不省；上下文到一百万时省下约五分之三的索引计算。
# 4. 形成候选池的那一层不受池的限制：池里丢了的条目，答案不一定丢。
# 5. 索引器靠模仿注意力来学习；不教它，大部分答案就找不到了。
