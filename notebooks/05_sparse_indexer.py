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
# 1. compute an index score by hand, and say why even a cheap score is too dear to compute for everything;
# 2. say what the pool saves, from which context on, and which layers still look at every entry;
# 3. measure what a pool loses, and tell a lost entry from a lost answer.

# %%
import math

import torch

import tinyds41 as ds
from tinyds41 import ops
from tinyds41.cost.flops import decode_cost
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.rows import pool_shares, scored_entries
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_05 import check_binds, check_pool, check_scored
from tinyds41.formats import Rows
from tinyds41.show.generation_plots import plot_work_by_component
from tinyds41.show.index_observations import candidates
from tinyds41.show.index_plots import plot_candidates
from tinyds41.show.run_plots import LossPoint, plot_loss
from tinyds41.show.setting_plots import plot_quality_by_setting
from tinyds41.train.tasks import Needle, answers, needle_config, share

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run
torch.manual_seed(0)

# %% [markdown]
# ## Feel the problem
#
# Picture a desk and a cellar. On the desk lie the last pages, the *window*. The cellar holds a note on everything
# read before: the *entries*. For each new token a layer may fetch 512 notes. Which ones?
#
# An *indexer* decides. It gives every entry a score, and scoring one costs only a sixteenth of attending to one.
#
# **Guess first:** at a context of a million tokens, what costs more: one layer that scores every entry, or attention
# to the fetched entries in *all* layers together?

# %% tags=["nbval-check-output"]
flash, context = ds.Config.preset("flash"), 2**20
per_score = 2 * flash.index_n_heads * flash.index_head_dim  # a dot product per index head
per_row = 2 * 2 * flash.num_attention_heads * flash.head_dim  # a score and a weighted sum per head
one_scan = context * per_score
attention = decode_cost(flash).at(context).attention
print(f"attending to a row {per_row:>7,} FLOPs, scoring an entry {per_score:,}: {per_row // per_score} times less")
print(f"one scan of {context:,} entries {one_scan / 1e9:.2f} GFLOP")
print(f"attention in all {flash.num_hidden_layers} layers {attention / 1e9:.2f} GFLOP")
assert per_row == 16 * per_score and one_scan > 2.5 * attention

# %% [markdown]
# One scan costs more than twice the attention of the whole model. Cheap, times a million, is not cheap.
#
# So the released model scans as few times as it can. Thirty of its 40 layers reuse another layer's choice. Of the eight
# that choose, half may look only where one layer found something promising: the **candidate pool**, which this lesson
# is about.

# %% tags=["nbval-check-output"]
plan = flash.plan()
modes = {mode: [layer.layer for layer in plan if layer.mode == mode] for mode in ("FULL", "REINDEX", "REUSE", "SWA")}
pooled = [layer.layer for layer in plan if layer.pooled and layer.selects]
for mode, layers in modes.items():
    print(f"{mode:8} {len(layers):2}  {layers if len(layers) < 9 else ''}")
print("choose inside the pool:", pooled)
assert len(modes["REUSE"]) == 30 and len(modes["FULL"] + modes["REINDEX"]) == 2 * len(pooled) == 8

# %% [markdown]
# ## One equation
#
# A query has $I$ small heads. The score of entry $j$ for the token at position $p$ is
#
# $$\text{score}(p, j) = \frac{1}{\sqrt{I J}} \sum_{i=1}^{I} w_{p,i} \,\max(0,\; q_{p,i} \cdot k_j)$$
#
# Each head asks its own question $q_{p,i}$; an entry answers with its one key $k_j$ of $J$ numbers; a head that finds
# nothing is silent, for the maximum cuts its negative answers; and the token itself weighs its heads by $w_{p,i}$.
#
# No softmax: only the *order* of the scores matters. The best $K$ are fetched, of equal ones the earlier.

# %% [markdown]
# ## Naive version
#
# Plain Python, one entry at a time. The pool cuts the entries into blocks, gives each block the score of its best
# entry, and keeps the best blocks. The newest block is always kept: it has just been written, and a later layer will
# want it.

# %%
def score(queries, weights, key):
    """The equation, one head after another."""
    heads, channels = queries.shape
    dots = [max(0.0, float(query @ key)) for query in queries]
    return sum(float(w) * dot for w, dot in zip(weights, dots)) / math.sqrt(heads * channels)


def best(scores, k):
    """Places of the k highest, of equal ones the lower; in ascending order."""
    return sorted(sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:k])


def pool_of(scores, size, n_blocks):
    """The best blocks by their best entry; the newest is always in."""
    blocks = [max(scores[start : start + size]) for start in range(0, len(scores), size)]
    blocks[-1] = math.inf
    return best(blocks, n_blocks)


def choose(scores, size, pool, k):
    """The k best entries of a later layer, which may only look inside the pool."""
    inside = [s if place // size in pool else -math.inf for place, s in enumerate(scores)]
    return best(inside, k)

# %% [markdown]
# Does the library do the same? We let both choose among 45 random entries: one layer forms a pool of three blocks of
# four, a second layer chooses 5 entries inside it.

# %%
n, size, blocks, k = 45, 4, 3, 5
queries, weights, keys = torch.randn(2, 3, 8).double(), torch.rand(2, 3).double(), torch.randn(n, 8).double()
first, second = ([score(q, w, key) for key in keys] for q, w in zip(queries, weights))
mine = pool_of(first, size, blocks)
visible = {"first": torch.tensor([[0]]), "last": torch.tensor([[n]]), "k": k, "block_size": size}
store = Rows(keys[None])
chosen, pool = ops.score_and_select(queries[None, :1], weights[None, :1], store, **visible, form_blocks=blocks)
later, _ = ops.score_and_select(queries[None, 1:], weights[None, 1:], store, **visible, pool=pool)
print("pool", mine, "first layer", best(first, k), "second layer", choose(second, size, mine, k))
assert pool.flatten().tolist() == mine and chosen.flatten().tolist() == best(first, k)
assert later.flatten().tolist() == choose(second, size, mine, k) != best(second, k)

# %% [markdown]
# Equal, place by place. The last assertion also says that the second layer would have chosen otherwise had it been
# free: the pool *does* take something away. What does that cost?
#
# ## A task with known answers
#
# We need a task where we know which entry matters. A row holds eight facts, a *key* and its *value*, between fillers,
# and ends with eight questions: each key again. The answer is the value. Keys meet new values in every row, so the
# weights cannot know the answer. It must be fetched.

# %% tags=["nbval-check-output"]
task = Needle(n_facts=8, n_keys=16, n_values=16, n_fillers=16)
names = ["-"] * 4 + [f"K{i}" for i in range(16)] + [f"v{i}" for i in range(16)] + ["."] * 16
ids, _, wanted = task.batch(step=0, batch_size=1, length=48, seed=3)
print(" ".join(names[i] for i in ids[0, :-1]))
print("answers:", " ".join(names[i] for i in wanted[0, -task.n_facts :]))
assert (ids[0, task.places(ids[:, :-1])[0]] == ids[0, -9:-1]).all()

# %% [markdown]
# ## Train a tiny one
#
# Four layers: two with windows only, one that writes an entry per two tokens, scores all of them and forms the pool,
# and one that chooses inside it. Each fetches 16 entries; the pool has room for eight blocks of four.
#
# First on rows of 32 tokens. Those are 16 entries, so everything is fetched and the indexer can do no harm while it
# learns to imitate attention. Then a few steps on rows of 256 tokens, where it has to choose.

# %%
toy = needle_config(task)
model = ds.Model(toy, seed=0)
print(toy.plan())

# %%
common = {"seed": 0, "learning_rate": 3e-3}
short = ds.train(model, task, steps=260, batch_size=32, length=32, **common)
long = ds.train(model, task, steps=40, batch_size=4, length=256, **common)
points = [LossPoint(step, "train", loss) for step, loss in enumerate(short.losses + long.losses, 1)]
ax = plot_loss(points, model="the toy, questions only", vocab_size=task.n_values)
assert sum(short.losses[-10:]) / 10 < 0.2

# %% [markdown]
# The dashed line is a blind guess among 16 values. For a while the toy does no better, then it finds out how to look
# things up, within a few dozen steps.
#
# **Guess first:** it never saw more than 256 tokens. How many questions does it answer in rows of 512? Of 2,048?

# %%
by_length = {length: answers(model, task, length=length, n_rows=24) for length in (32, 128, 512, 2048)}
for length, found in by_length.items():
    print(f"{length:5} tokens, {length // 2:5} entries: {found.accuracy:.3f} right, {1 / task.n_values:.3f} by chance")
assert by_length[32].accuracy > 0.9 and by_length[512].accuracy > 0.85
assert by_length[2048].accuracy < by_length[512].accuracy

# %% [markdown]
# ## What the indexer saw
#
# One question in a row of 256 tokens. A bar is a block of four entries, as high as the score of its best one. Blue
# blocks are in the pool, the hatched one is the newest. Diamonds are the entries that layer 2 fetched.

# %%
length, layer = 256, toy.candidate_source_layer_id
ids = task.batch(step=0, batch_size=1, length=length, seed=1).ids[:, :-1]
trace = ds.Trace("layers.*.indexer.*")
with torch.no_grad():
    model(ids, trace=trace)
question = length - 1
seen = candidates(trace, toy, question)
ax = plot_candidates(seen, model="the toy")
fact = int(task.places(ids)[0, -1]) // 2
print(f"the fact is entry {fact}, in block {fact // toy.candidate_block_size}; chosen: {seen[fact].selected}")

# %% [markdown]
# The naive version, on the queries and keys of this very run:

# %%
q, w, keys = (trace[f"layers.{layer}.indexer.{part}"][0] for part in ("queries", "weights", "keys"))
scores = trace[f"layers.{layer}.indexer.scores"][0, question]
naive = torch.tensor([score(q[question], w[question], key) for key in keys])
print(f"{len(naive)} scores, largest {naive.max():.2f}; largest difference {(naive - scores).abs().max():.0e}")
assert torch.allclose(naive, scores, atol=1e-4)
in_pool = {one.block for one in seen if one.in_pool}
assert len(in_pool) == toy.candidate_topk_blocks and {one.block for one in seen if one.newest} <= in_pool

# %% [markdown]
# ## Guess before running
#
# Rows of 512 tokens: 256 entries in 64 blocks. The toy was trained with a pool of eight blocks. We change that number
# *after* training, down to a single block, which then is the newest: it holds questions, and no fact.
#
# Write down two curves: how often the fact of a question is in the pool, and how often the answer is right.

# %%
def ask(**changes):
    """The trained toy under a changed config, on rows of 512 tokens."""
    return answers(ds.variant(model, **changes), task, length=512, n_rows=24)


by_blocks = {blocks: ask(candidate_topk_blocks=blocks) for blocks in (1, 2, 4, 8, 16, 32, 64)}
curves = {
    "answer right": {blocks: found.accuracy for blocks, found in by_blocks.items()},
    "fact in the pool": {blocks: share(found.pooled) for blocks, found in by_blocks.items()},
}
ax = plot_quality_by_setting(curves, setting="candidate_topk_blocks", trained=8, model="the toy")

# %%
for blocks in (1, 2, 8, 64):
    found = by_blocks[blocks]
    print(f"{blocks:2} blocks: fact in the pool {share(found.pooled):.3f}, answer right {found.accuracy:.3f}")
assert share(by_blocks[1].pooled) == 0 and by_blocks[1].accuracy > 0.7
assert share(by_blocks[8].pooled) > 0.9

# %% [markdown]
# **The surprise.** With one block *every* fact is lost from the pool, and nearly every answer survives.
#
# The layer that forms the pool is not bound by it. It had scored everything, fetched the fact itself, and passed it on
# in the token's own stream. The pool only binds the layers behind it. A lost entry is not a lost answer.
#
# What the curve does not show: tasks where a later layer needs an entry that the first had no reason to want. This toy
# has none; there, what the pool drops is gone.

# %% [markdown]
# ## Hits and misses
#
# In rows of 2,048 tokens the toy does fail at a good many questions.
#
# **Guess first:** who is to blame? The indexer, which had to find 1 entry among 1,024? Or attention, which got 16 of
# them and had to read the right one? We know for each question whether layer 2 had fetched the fact.

# %%
found = by_length[2048]
fetched, right = found.chosen[2], found.right
for name, mask in (("fetched", fetched), ("not fetched", ~fetched)):
    print(f"fact {name:11}: {int((mask & right).sum()):3} right, {int((mask & ~right).sum()):3} wrong")
assert fetched.numel() == 24 * task.n_facts and share(fetched) > 0.9
assert share(fetched[~right]) > 0.5  # most misses are not the indexer's

# %% [markdown]
# The indexer finds nearly every fact, in rows eight times as long as any it was taught on. What fails is reading: the
# fact lies on the desk among other notes, and attention picks the wrong one.
#
# So a wrong answer does not prove that something was not found. Nor does this table prove that the indexer is always
# the better part: the fillers here are easy to tell from facts.

# %% [markdown]
# ## Take the lesson away
#
# The indexer gets no gradient from the loss: choosing has none. It learns by imitation, to rank entries as attention
# would if it saw all of them. So here is the same trained toy with its indexers set back to first, random weights.
#
# **Guess first:** which part of the answers is left in rows of 512 tokens? And does a larger pool help?

# %%
fresh, trained = ds.Model(toy, seed=0).state_dict(), model.state_dict()
mixed = {name: fresh[name] if ".indexer." in name else trained[name] for name in trained}
untaught = ds.Model(toy, seed=0)
untaught.load_state_dict(mixed)
for length in (32, 128, 512):
    taught, random = by_length[length].accuracy, answers(untaught, task, length=length, n_rows=24).accuracy
    print(f"{length:4} tokens: taught {taught:.3f}, untaught {random:.3f}")
assert random < 0.5 * taught

# %%
blind = {blocks: answers(ds.variant(untaught, candidate_topk_blocks=blocks), task, length=512, n_rows=12)
         for blocks in (1, 2, 4, 8, 16, 32, 64)}
curves = {
    "fact in the pool": {blocks: share(found.pooled) for blocks, found in blind.items()},
    "answer right": {blocks: found.accuracy for blocks, found in blind.items()},
}
ax = plot_quality_by_setting(curves, setting="candidate_topk_blocks", trained=8, model="the untaught toy")
assert blind[64].accuracy < 0.6 and share(blind[64].pooled) == 1 > share(blind[8].pooled)

# %% [markdown]
# **It hurts.** At 32 tokens nothing is lost, for there everything is fetched. At 512 most answers are gone, though
# attention itself was not touched: it cannot read what nobody brings up from the cellar.
#
# A larger pool brings the facts back into the pool, and hardly an answer: of what the pool offers, the untaught
# indexer still fetches the wrong 16.
#
# How much of attention does the taught indexer keep?

# %%
recall = long.records[-1]["recall"]
for source, kept in recall.items():
    print(f"layer {source}: {kept['selection']:.2f} of attention's mass is fetched, {kept['pool']:.2f} in the pool")
assert all(0.2 < kept["selection"] < 0.95 for kept in recall.values())

# %% [markdown]
# **A miss.** A good part of what attention would have looked at, had it seen everything, is never fetched; yet nearly
# every answer survives. Recall of mass is what the indexer is trained on, and a poor judge of what matters: much of
# that mass is spread thinly over fillers.
#
# > **Correction.** Some accounts say that training makes the pool accurate enough. Enough for what? Here, for finding
# facts among fillers, at a recall that looks poor. Another task may need the rest.

# %% [markdown]
# ## What it costs, and what it saves
#
# Back to the released sizes. An index key takes 68 of the 356 bytes of an entry. The pool itself costs no bytes: it is
# formed anew for every token.
#
# **Guess first:** four of the eight layers that choose are bound to the pool. At a context of 8,192 tokens, how much
# of the index work does the pool save? And at a million?

# %% tags=["nbval-check-output"]
for context in (2**12, 2**13, 2**14, 2**16, 2**18, 2**20):
    full, pool = (sum(rows.values()) for rows in scored_entries(flash, context))
    free = full + len(pooled) * context  # what the bound layers would score if they were free
    held, _ = pool_shares(flash, context)
    print(f"{context:>9,}: {full:>9,} scanned + {pool:>6,} in pools, saved {1 - (full + pool) / free:4.0%}; "
          f"a pool holds {held:6.1%}")
assert full + pool == 2_686_976 and kv_bytes(flash).of("index keys")[0].row_bytes == 68

# %% [markdown]
# Nothing at all up to 16,384 tokens, where the pool still holds everything. At a million it saves three fifths, and of
# what is left the four full scans do nearly all.
#
# So decode work is not flat, as popular accounts have it. The bound layers are flat; the four that scan are not.

# %%
work = [decode_cost(flash, "flash").at(context, "weighted") for context in (2**12, 2**14, 2**16, 2**18, 2**20)]
ax = plot_work_by_component(work)
scans = work[-1].index_full / (work[-1].index_full + work[-1].index_pool)
print(f"at a million tokens full scans are {scans:.1%} of index work and {work[-1].index_full / work[-1].total:.0%} of all")
assert scans > 0.97

# %% [markdown]
# ## Exercise 1
#
# What is the longest context of `flash` at which its pool still holds every entry?
#
# <details><summary>Hint</summary>
#
# `candidate_topk_blocks` blocks of `candidate_block_size` entries; the layer that forms the pool has ratio 1.
#
# </details>

# %%
longest = ...
check_binds(longest)

# %% [markdown]
# ## Exercise 2
#
# Write the pool yourself: from the scores of the visible entries, a block size and a number of blocks, the list of
# blocks in ascending order. Mind ties, the newest block, and a last block that is not full.
#
# <details><summary>Hint</summary>
#
# `pool_of` above is one way. Another: give each block a pair (score, minus its number) and sort.
#
# </details>

# %%
my_pool = ...  # such as: lambda scores, size, n_blocks: [0]
check_pool(my_pool)

# %% [markdown]
# ## Exercise 3
#
# How many index rows do all layers of `flash` together score for one token at a context of $n$? Write it as a
# function. A pool is scored in whole blocks, also where its newest block is not full.
#
# <details><summary>Hint</summary>
#
# The table of layers above: which FULL layers have ratio 2, which ratio 1, and how many choose inside the pool?
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
check_binds(flash.candidate_topk_blocks * flash.candidate_block_size)
check_pool(pool_of)
check_scored(lambda n: 3 * (n // 2) + n + 4 * 8 * min(2048, -(-n // 8)))
assert refuses(check_binds, 2048)
assert refuses(check_pool, lambda scores, size, n: best(range(-(-len(scores) // size)), n))
assert refuses(check_scored, lambda n: 8 * n)

# %% [markdown]
# ## Recap
#
# - A score costs a sixteenth of attending to a row, and a million of them still cost more than all attention.
# - The pool keeps the best blocks and the newest one. It saves nothing up to 16,384 tokens and three fifths of index
#   work at a million.
# - The layer that forms the pool is not bound by it, so a fact that the pool loses may be answered all the same.
# - An indexer learns by imitation. Untaught, it takes most answers with it.
#
# [Technical report](https://arxiv.org/abs/2609.19969): §2.2.

# %% [markdown]
# ## 中文小结
#
# 1. 索引器给每个条目打分，单价只有注意力的十六分之一；但给一百万个条目打分，比整个模型的注意力还贵。
# 2. 候选池保留得分最高的块和最新的块；池后的层只在池中挑选。
# 3. 上下文不超过 16,384 时，候选池什么也不省；到一百万时省下约五分之三的索引计算。
# 4. 形成候选池的那一层不受池的限制：池里丢了的条目，答案不一定丢。
# 5. 索引器靠模仿注意力来学习；不教它，大部分答案就找不到了。
