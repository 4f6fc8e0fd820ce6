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
# # Do forty layers need forty memories?
#
# **Lesson 04, CSA2 attention: Full, Reindex, Reuse.** 25 minutes to read, under two minutes to run on one CPU thread,
# no GPU.
#
# Afterwards you can
# 1. say of each layer who wrote what it reads, and who chose it;
# 2. derive the bytes and the index work of a schedule, and change it;
# 3. measure what a layer loses when it follows another layer's choice.

# %%
import torch

import tinyds41 as ds
from tinyds41.cost.kv_bytes import kv_bytes, unshared_bytes_per_token
from tinyds41.cost.rows import scored_entries
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_04 import check_follows, check_own_choice, check_rows
from tinyds41.show.explore_plan import explore_plan, plan_view
from tinyds41.show.index_observations import OVERLAP_NAMES, selection_overlaps
from tinyds41.show.index_plots import plot_selection_overlap
from tinyds41.show.setting_plots import plot_quality_by_setting
from tinyds41.train.tasks import Needle, answers, needle_config, share

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run

# %% [markdown]
# ## Feel the problem
#
# In an ordinary transformer every layer takes its own notes on everything it reads, and searches them itself. Think of
# an office where forty colleagues read the same letter, and each keeps a copy and an index of it.
#
# **Guess first:** the released model has 38 layers that read far back. How many of them keep notes? And how much
# larger would its cache be if all of them did?

# %% tags=["nbval-check-output"]
flash = ds.Config.preset("flash")
plan, cache = flash.plan(), kv_bytes(flash)
readers = [layer.layer for layer in plan if layer.ratio]
writers = [layer.layer for layer in plan if layer.writes_globals]
shared = sum(row.bytes_per_token for row in cache.of("global KV"))
alone = unshared_bytes_per_token(flash)
print(f"{len(readers)} layers read entries; {writers} write them; a layer fetches {flash.index_topk} at most")
print(f"rows to attend to, per token: {int(alone):,} bytes if each reader wrote its own, {int(shared)} as it is:"
      f" {float(alone / shared):.1f} times less")
assert len(readers) == 38 and len(writers) == 4

# %% [markdown]
# Four layers take notes for 38. (With the keys to find them by, 890 bytes per token in all.) The others read what those
# four wrote.
#
# Sharing has a second half. To *choose* which notes to fetch a layer must score them, and few layers do that.

# %% [markdown]
# ## One picture
#
# - **FULL** writes entries, scores them and chooses.
# - **REINDEX** scores the entries of the latest FULL layer with queries of its own, and chooses.
# - **REUSE** takes both entries and choice from before. It writes nothing and scores nothing.
# - **SWA** has its window of the last tokens alone. (Every layer has one.)
#
# One colleague files the letter, some look things up in his file, most ask "what did you just look at?".

# %%
ax = plan_view(flash, name="flash")

# %% [markdown]
# ## One equation, and the naive version
#
# A schedule is three lists: tokens per entry of each layer, the layers that write, the layers that choose. Each layer
# follows the *latest* of each kind, itself included:
#
# $$\text{kv}(l) = \max\{s \in \text{writers} : s \le l\}, \quad
# \text{index}(l) = \max\{s \in \text{choosers} : s \le l\}$$
#
# From it follow the bytes per token, $\sum_{s \in \text{writers}} (288 + 68) / m_s$ with $m_s$ tokens per entry.

# %%
def latest(layer, sources):
    return max((source for source in sources if source <= layer), default=None)


def derive(config):
    """(mode, whose entries, whose choice) of each layer."""
    rows = []
    for layer in range(config.num_hidden_layers):
        kv, index = latest(layer, config.kv_source_layer_ids), latest(layer, config.index_source_layer_ids)
        if not config.compress_ratios[layer]:
            rows.append(("SWA", None, None))
        else:
            mode = "FULL" if kv == layer else "REINDEX" if index == layer else "REUSE"
            rows.append((mode, kv, index))
    return rows


for name in ds.preset_names():
    config = ds.Config.preset(name)
    assert derive(config) == [(layer.mode, layer.kv_source, layer.index_source) for layer in config.plan()]
key, row = (cache.of(store)[0].row_bytes for store in ("index keys", "global KV"))
assert (row, key) == (288, 68) and sum((row + key) / plan[s].ratio for s in writers) == cache.bytes_per_token == 890

# %% [markdown]
# The same for all four presets. An inconsistent schedule is refused, with the reason:

# %%
try:
    flash.replace(kv_source_layer_ids=[3, 8, 14, 20])
except ValueError as error:
    print("refused:", error)

# %% [markdown]
# In a live notebook, edit a schedule here: a mode per layer, and what it costs below. The picture above is its static
# twin.

# %%
# NBVAL_IGNORE_OUTPUT
explore_plan(ds.Config.preset("toy"), name="the toy")

# %% [markdown]
# ## A toy in which every layer chooses
#
# The task is that of lesson 05: a row hides eight facts, a name and its value, among fillers, and ends with eight
# questions. The answer must be fetched, for a name has another value in every row.
#
# Our toy has two layers with windows and four that read entries: one FULL, then three REINDEX. So four layers choose,
# each for itself, 16 entries per token. Rows of 32 tokens first (16 entries: everything is fetched), then longer ones.

# %%
task = Needle()
toy = needle_config(
    task, num_hidden_layers=6, compress_ratios=(0, 0, 2, 2, 2, 2), kv_source_layer_ids=(2,),
    index_source_layer_ids=(2, 3, 4, 5), candidate_source_layer_id=None, candidate_topk_blocks=0)
print(toy.plan())

# %%
model = ds.Model(toy, seed=0)
common = {"seed": 0, "learning_rate": 3e-3}
short = ds.train(model, task, steps=200, batch_size=32, length=32, **common)
long = ds.train(model, task, steps=40, batch_size=4, length=256, **common)
found = answers(model, task, length=512, n_rows=24)
print(f"rows of 512 tokens: {found.accuracy:.3f} right, {1 / task.n_values:.3f} by chance")
for source, chosen in found.chosen.items():
    print(f"layer {source} fetches the fact in {share(chosen):.3f} of cases")
assert found.accuracy > 0.8

# %% [markdown]
# All four find it. So, **guess first:** of the 16 entries that two of these layers choose for the same token, how many
# are the same? If the layers agree, one choice would do for all.

# %%
trace = ds.Trace(*OVERLAP_NAMES)
ids = task.batch(step=0, batch_size=8, length=512, seed=1).ids[:, :-1]
with torch.no_grad():
    model(ids, trace=trace)
questions = range(512 - task.n_facts, 512)
overlaps = selection_overlaps(trace, toy, questions)
ax = plot_selection_overlap(overlaps, model="the toy", queries="8 questions in 8 rows")
pairs = [one.shared for one in overlaps if one.layer < one.other]
print(f"two layers agree on {min(pairs):.2f} to {max(pairs):.2f} of what either chose")
assert max(pairs) < 0.8

# %% [markdown]
# They do not. Of all entries that either of two layers fetched, well under two thirds were fetched by both.
#
# ## Guess before running
#
# Now we take the choice away from layer 5, then from 4, then from 3, without training anew: each becomes a REUSE layer
# and must work with what an earlier layer fetched. In the end layer 2 chooses for all.
#
# Draw the curve: answers right with four, three, two layers and one that choose.

# %%
def choosing(n, **changes):
    """The trained toy with only its first n choosers left; the others reuse."""
    return ds.variant(model, index_source_layer_ids=toy.index_source_layer_ids[:n], **changes)


by_n = {n: answers(choosing(n), task, length=512, n_rows=24) for n in (1, 2, 3, 4)}
context = 4096
scored = {n: sum(scored_entries(choosing(n).config, context)[0].values()) for n in by_n}
curves = {
    "answer right": {n: found.accuracy for n, found in by_n.items()},
    "index work, of four": {n: rows / scored[4] for n, rows in scored.items()},
}
ax = plot_quality_by_setting(curves, setting="index sources", trained=4, model="the toy")

# %%
for n, found in by_n.items():
    print(f"{n} choosing: {found.accuracy:.3f} right, {scored[n]:,} index rows scored at a context of {context:,}")
assert by_n[1].accuracy > by_n[4].accuracy - 0.08 and scored[4] == 4 * scored[1]

# %% [markdown]
# **The surprise.** Layers that agree on less than two thirds of their choice can trade it for another layer's, and the
# answers hardly change. The work of choosing falls to a quarter.
#
# Why? Look at *what* they share. If the one entry that matters is among the 16 of every layer, the rest is filling, and
# different filling does no harm.

# %%
selections = [trace[f"layers.{source}.indexer.selection"][:, -task.n_facts :] for source in (2, 3, 4, 5)]
entry = task.places(ids).unsqueeze(-1) // 2
for source, selection in zip((3, 4, 5), selections[1:], strict=True):
    common_to_both = (selection.unsqueeze(-1) == selections[0].unsqueeze(-2)).any(-1).sum(-1).float().mean()
    has_fact = ((selection == entry).any(-1) & (selections[0] == entry).any(-1)).float().mean()
    print(f"layers 2 and {source}: {common_to_both:.1f} of 16 entries in common; the fact in both {has_fact:.3f}")
assert has_fact > 0.8

# %% [markdown]
# What this does not show: tasks where different layers need *different* entries. The released model keeps four REINDEX
# layers in its second half: one choice for twenty layers may be too few there.
#
# ## Where it does cost
#
# With one entry instead of 16 there is no filling. And long rows are harder. Hits and misses:

# %%
for length, k in ((512, 1), (2048, 16), (2048, 1)):
    own, one = (answers(choosing(n, index_topk=k), task, length=length, n_rows=12).right for n in (4, 1))
    print(f"{length:5} tokens, {k:2} fetched: {int(own.sum()):2} of {own.numel()} right with four choices,"
          f" {int(one.sum()):2} with one; {int((own & ~one).sum())} lost, {int((one & ~own).sum())} won")

# %% [markdown]
# Some answers are lost, and some are won: a layer that follows may be luckier than one that chose. Neither count is
# large beside the other cost of long rows, which both pay.
#
# ## Take it away
#
# REUSE layers write and choose nothing. Could we do without *reading*? We turn the last layers into window-only ones,
# one after another, until nobody reads entries. **Guess first:** how many reading layers does an answer need?

# %%
def reading(n):
    """The trained toy with only its first n entry layers left; the others have their window alone."""
    ratios = [0, 0] + [2] * n + [0] * (4 - n)
    sources = toy.index_source_layer_ids[:n]
    return ds.variant(model, compress_ratios=ratios, index_source_layer_ids=sources, kv_source_layer_ids=sources[:1])


by_reading = {n: answers(reading(n), task, length=512, n_rows=24).accuracy for n in (1, 2, 3, 4)}
windows = answers(reading(0), task, length=512, n_rows=24).accuracy
print({n: round(right, 3) for n, right in by_reading.items()}, "windows alone", round(windows, 3))
assert windows < 0.25 and by_reading[4] > 0.8

# %% [markdown]
# **It hurts.** Without entries the toy is down to guessing: its window of eight tokens holds the questions.
#
# How much the number of reading layers matters is a property of this toy and this task, and of training: all four read
# while it learned.
#
# ## What it costs
#
# Back to `flash`: what each half of sharing saves, at a million tokens.

# %% tags=["nbval-check-output"]
def index_rows(config):
    return sum(sum(rows.values()) for rows in scored_entries(config, 2**20))


free = flash.replace(candidate_source_layer_id=None, candidate_topk_blocks=0)
everyone = free.replace(index_source_layer_ids=readers)
for name, config in (("every reader chooses", everyone), ("eight choose", free), ("four of them in a pool", flash)):
    print(f"{name:22} {index_rows(config):>12,} index rows scored per token")
print(f"bytes per token: {sum((row + key) / plan[reader].ratio for reader in readers):,.0f} if every reader wrote,"
      f" {cache.bytes_per_token} as it is")
assert index_rows(everyone) / index_rows(free) > 4 and index_rows(flash) == 2_686_976

# %% [markdown]
# Sharing the choice saves more index work than the pool of lesson 05. Attention itself is not cheaper: every reader
# still attends to its window and its 512 fetched rows. But fetched once, they serve all followers.

# %% [markdown]
# ## Exercise 1
#
# Whose choice does a layer of `flash` follow? Write a function from the layer's number to its index source; `None` for
# a layer with a window only.
#
# <details><summary>Hint</summary>
#
# `flash.index_source_layer_ids`, and the second equation above.
#
# </details>

# %%
follows = ...  # such as: lambda layer: 2
check_follows(follows)

# %% [markdown]
# ## Exercise 2
#
# How many entries has a layer of `flash` written after so many tokens? A group that is not full has no entry yet.
#
# <details><summary>Hint</summary>
#
# Most layers: none. For the four others look at the ratios below the picture.
#
# </details>

# %%
written = ...  # such as: lambda layer, context: 0
check_rows(written)

# %% [markdown]
# ## Exercise 3
#
# If every reader of `flash` chose for itself among all its entries, without a pool: how many index rows would one token
# at a context of $n$ score? Write the function.
#
# <details><summary>Hint</summary>
#
# How many readers have ratio 2, how many ratio 1? Mind odd contexts.
#
# </details>

# %%
own_choice = ...  # such as: lambda n: n
check_own_choice(own_choice)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
check_follows(lambda layer: latest(layer, flash.index_source_layer_ids) if flash.compress_ratios[layer] else None)
check_rows(lambda layer, n: n // plan[layer].ratio if layer in writers else 0)
check_own_choice(lambda n: 18 * (n // 2) + 20 * n)
assert refuses(check_follows, lambda layer: latest(layer, writers))
assert refuses(check_rows, lambda layer, n: n // 2) and refuses(check_own_choice, lambda n: 29 * n)

# %% [markdown]
# ## Recap
#
# - Four layers of 40 write, eight choose, 38 read. The rest follow the latest writer and the latest chooser.
# - Layers choose differently and can still share a choice, as long as what matters is in it.
# - Reading cannot be shared away: without entries the toy is down to guessing.
#
# [Technical report](https://arxiv.org/abs/2609.19969): §2.3. Next: **lesson 05**, how a choice is made.

# %% [markdown]
# ## 中文小结
#
# 1. 38 层要读远处的条目，只有四层写条目，其余各层读别层写下的。
# 2. Full 层写并选，Reindex 层只重新选，Reuse 层两样都沿用。
# 3. 各层的选择差别很大，但让后面的层沿用第一层的选择，答案几乎不变：要紧的那一条都在里面。
# 4. 把读取条目的层全部换成只有滑动窗口，玩具模型就只能瞎猜。
# 5. 共享选择省下的索引计算比候选池还多；注意力本身并没有省。
