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
# **Lesson 04, CSA2 attention: Full, Reindex, Reuse.** 25 minutes to read, about a minute to run on one CPU thread,
# no GPU.
#
# Afterwards you can
# 1. say for each layer which layer wrote the entries it reads, and which layer chose among them;
# 2. derive the bytes and the index work of a schedule, and change it;
# 3. measure what changes when a layer follows another layer's choice.

# %%
import torch

import tinyds41 as ds
from tinyds41.cost.kv_bytes import kv_bytes, unshared_bytes_per_token
from tinyds41.cost.rows import attended_rows, gathered_rows, scored_entries
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_04 import check_follows, check_own_choice, check_rows
from tinyds41.show.explore_plan import explore_plan, plan_view
from tinyds41.show.index_observations import OVERLAP_NAMES, selection_overlaps
from tinyds41.show.index_plots import plot_selection_overlap
from tinyds41.show.setting_plots import plot_quality_by_setting
from tinyds41.train.examples import example_record
from tinyds41.train.tasks import Needle, answers, needle_config, share

torch.set_num_threads(1)  # more threads sum in another order, so the last bits would differ between runs

# %% [markdown]
# ## Feel the problem
#
# In an ordinary transformer every layer keeps notes on all it reads: forty colleagues who each copy the same letter.
# Here a note is an *entry*, a row of numbers that stands for one or two tokens. With it goes a *key*, a shorter row, by
# which entries are scored. To *choose* is to keep the best scores.
#
# **Guess first:** in the released model 38 layers read entries. How many write them? And how many bytes would the rows
# take if every reader wrote its own?

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
# Four layers write for 38. (With the keys, 890 bytes per token in all.) The others read what those four wrote.
#
# Sharing has a second half: few layers choose, the others fetch what was chosen.

# %% [markdown]
# ## One picture
#
# - **FULL** writes entries and their keys, scores them and chooses.
# - **REINDEX** scores the entries of the latest FULL layer anew, and chooses.
# - **REUSE** takes both entries and choice from before: it writes no entries and scores none.
# - **SWA**, sliding-window attention, reads its window of the last tokens alone.
#
# Every layer has its own queries and its own window. In the picture, "selection of" names the layer that chose, in the
# config an *index source*. Pool, Engram and the halves belong to other lessons.

# %%
ax = plan_view(flash, name="flash")

# %% [markdown]
# ## One equation, and the naive version
#
# A schedule is three lists: tokens per entry of each layer, layers that write, layers that choose. A layer with entries
# follows the *latest* of each kind, itself included:
#
# $$\text{kv}(l) = \max\{s \in \text{writers} : s \le l\}, \quad
# \text{index}(l) = \max\{s \in \text{choosers} : s \le l\}$$
#
# So the bytes per token are $\sum_{s \in \text{writers}} (288 + 68) / m_s$, $m_s$ tokens per entry: a row has 512
# numbers of half a byte and a scale byte per 16, a key 128 and one per 32.

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
assert row == 512 // 2 + 512 // 16 == 288 and key == 128 // 2 + 128 // 32 == 68
assert sum((row + key) / plan[s].ratio for s in writers) == cache.bytes_per_token == 890

# %% [markdown]
# The same for every preset. An inconsistent schedule is refused. New entries need a new choice, for an old one numbers
# the entries of another layer:

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
# The task is that of lesson 05: a text hides eight facts, a name and its value, among fillers, and ends with eight
# questions. The answer must be fetched, for a name has another value in every text.
#
# Our toy has two layers with windows and four that read: one FULL, three REINDEX. Each chooses for itself, 16 entries
# per token. Short texts (16 entries: everything is fetched) it was taught before, by the command printed below; longer
# ones it learns here.

# %%
task, model, record = Needle(), ds.example("choosers"), example_record("choosers")
toy = needle_config(
    task, num_hidden_layers=6, compress_ratios=(0, 0, 2, 2, 2, 2), kv_source_layer_ids=(2,),
    index_source_layer_ids=(2, 3, 4, 5), candidate_source_layer_id=None, candidate_topk_blocks=0)
print(toy.plan())
assert model.config == toy
print(f"{record['command']}: {record['right']['share']:.3f} right, in texts of 32 tokens")

# %%
_ = ds.train(model, task, steps=40, batch_size=4, length=256, seed=0, learning_rate=3e-3)
found = answers(model, task, length=512, n_rows=16)
print(f"texts of 512 tokens: {found.accuracy:.3f} right, {1 / task.n_values:.3f} by chance")
for source, chosen in found.chosen.items():
    print(f"layer {source} fetches the fact in {share(chosen):.3f} of cases")
assert found.accuracy > 0.8

# %% [markdown]
# All four find it. So, **guess first:** of the 16 entries that two of these layers fetch for the same token, how many
# are the same? Two blind choices among 256 would share one.

# %%
trace = ds.Trace(*OVERLAP_NAMES)
ids = task.batch(step=0, batch_size=8, length=512, seed=1).ids[:, :-1]
with torch.no_grad():
    model(ids, trace=trace)
chosen = [trace[f"layers.{source}.indexer.selection"][:, -task.n_facts :] for source in toy.index_source_layer_ids]
same = [(other.unsqueeze(-1) == chosen[0].unsqueeze(-2)).any(-1).sum(-1).float().mean().item() for other in chosen[1:]]
for source, n in zip((3, 4, 5), same, strict=True):
    print(f"layer {source} has {n:.1f} of its 16 entries in common with layer 2")
assert all(3 < n < 13 for n in same) and 16 * 16 / 256 == 1

# %%
overlaps = selection_overlaps(trace, toy, range(512 - task.n_facts, 512))
ax = plot_selection_overlap(overlaps, model="the toy", queries="64 questions")
assert max(one.shared for one in overlaps if one.layer != one.other) < 0.65

# %% [markdown]
# Partly. Half of what a layer fetches, another one does not. (The picture counts tokens in both choices over tokens in
# either, so half of each makes a third.)

# %% [markdown]
# ## Guess before running
#
# Now we take the choice away from layer 5, then from 4, then from 3, without training anew: each becomes a REUSE layer
# and must work with what came before.
#
# And a control. Layers 3 to 5 fetch *something*, but the wrong thing: their scores are all set to zero, so they get the
# first 16 entries. Draw both curves against the number of layers that still choose well.

# %%
def following(n, **changes):
    """The trained toy with only its first n choosers left; the others follow."""
    return ds.variant(model, index_source_layer_ids=toy.index_source_layer_ids[:n], **changes)


def blinded(n):
    """The trained toy with only its first n choosers left; the others score everything alike."""
    blind = [f"layers.{source}.indexer.weights_proj.weight" for source in toy.index_source_layer_ids[n:]]
    other = ds.Model(toy, seed=0)
    other.load_state_dict({name: 0 * w if name in blind else w for name, w in model.state_dict().items()})
    return other

# %%
follow = {n: answers(following(n), task, length=512, n_rows=16) for n in (1, 2, 3)} | {4: found}
blind = {n: answers(blinded(n), task, length=512, n_rows=16) for n in (1, 2, 3)} | {4: found}
work = {n: sum(scored_entries(following(n).config, 4096)[0].values()) for n in follow}
curves = {
    "right, others follow": {n: found.accuracy for n, found in follow.items()},
    "right, others blind": {n: found.accuracy for n, found in blind.items()},
    "index work": {n: rows / work[4] for n, rows in work.items()},
}
ax = plot_quality_by_setting(curves, setting="index sources", trained=4, model="the toy")

# %%
changed = int((follow[1].right != follow[4].right).sum())
print(f"layers 3 to 5 follow: {follow[1].accuracy:.3f} right, {changed} of {follow[1].right.numel()} answers changed")
print(f"layers 3 to 5 blind:  {blind[1].accuracy:.3f} right")
assert follow[1].accuracy > follow[4].accuracy - 0.05 and blind[1].accuracy < follow[1].accuracy - 0.03
assert work[4] == 4 * work[1]

# %% [markdown]
# **The surprise.** Layers that would have fetched half other entries follow layer 2, and next to no answer changes. The
# work of choosing falls to a quarter.
#
# Would *any* choice have done? No: with a wrong one, answers are lost. But most survive, so the curve had no more room
# than that to fall.
#
# What matters is in every choice:

# %%
entry = task.places(ids).unsqueeze(-1) // 2
held = [(selection == entry).any(-1).float().mean().item() for selection in chosen]
for source, share_held in zip(toy.index_source_layer_ids, held, strict=True):
    print(f"layer {source}: the fact is among its 16 entries in {share_held:.3f} of 64 questions")
assert min(held) > 0.8

# %% [markdown]
# What this does not show: tasks where layers need *different* entries. The released model keeps four REINDEX layers in
# its second half: one choice for twenty layers may be too few there.
#
# ## Hits and misses
#
# Longer texts, and a single fetched entry instead of 16. **Guess first:** which of these four is best?

# %%
for length, k in ((512, 16), (512, 1), (2048, 16), (2048, 1)):
    found = answers(following(1, index_topk=k), task, length=length, n_rows=12)
    print(f"{length:5} tokens, {k:2} fetched: the fact is there in {share(found.chosen[2]):.3f},"
          f" {int(found.right.sum()):2} of {found.right.numel()} right")
assert share(found.chosen[2]) > 0.7

# %% [markdown]
# The misses of long texts hardly come from choosing: the fact is fetched nearly always, and answers are wrong all the
# same. Look at the last two lines: fetching *one* entry gives at least about as many right answers as fetching 16. What
# else is fetched can disturb. No schedule mends that.
#
# ## Take it away
#
# We turn reading layers into window-only ones, the last first, until nobody reads entries. **Guess first:** how many
# readers does an answer need?

# %%
def reading(n):
    """The trained toy with only its first n entry layers left; the others have their window alone."""
    ratios, sources = [0, 0] + [2] * n + [0] * (4 - n), toy.index_source_layer_ids[:n]
    return ds.variant(model, compress_ratios=ratios, index_source_layer_ids=sources, kv_source_layer_ids=sources[:1])


for n in (4, 3, 2, 1, 0):
    right = answers(reading(n), task, length=512, n_rows=16).accuracy if n < 4 else follow[4].accuracy
    print(f"{n} layers read entries: {right:.3f} right")
assert right < 0.25

# %% [markdown]
# **It hurts.** Some layer must read: without entries the toy guesses, for its window of eight tokens holds questions.
# In this toy one reader of four goes more than half of the way. A toy trained with fewer readers might need fewer
# still; we only removed them afterwards.
#
# ## Who writes what
#
# Count the rows that each layer of the toy really wrote for a text of 512 tokens:

# %% tags=["nbval-check-output"]
trace = ds.Trace("layers.*.compressor.global_kv", "layers.*.attn.window_kv")
with torch.no_grad():
    following(1)(ids[:1], trace=trace)
for layer in following(1).config.plan():
    entries = trace.get(f"layers.{layer.layer}.compressor.global_kv")
    written, window = 0 if entries is None else entries.shape[1], trace[f"layers.{layer.layer}.attn.window_kv"].shape[1]
    print(f"layer {layer.layer} {layer.mode:7}: {written:3} entries, {window} window rows, the last"
          f" {toy.sliding_window} in reach")

# %% [markdown]
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
print(f"sharing the choice saves {index_rows(everyone) / index_rows(free):.1f} times, the pool then"
      f" {index_rows(free) / index_rows(flash):.1f} times")
attended, gathered = (sum(rows(flash, 2**20).values()) for rows in (attended_rows, gathered_rows))
print(f"entries fetched {gathered:,}; rows attended to, windows included, {attended:,}")
assert index_rows(flash) == 2_686_976 and gathered == 8 * flash.index_topk

# %% [markdown]
# Sharing the choice saves more index work than the pool of lesson 05. Attention is not cheaper: every reader still
# attends to its window and its 512 fetched rows. But eight layers fetch, and what they fetch serves all followers.

# %% [markdown]
# ## Exercise 1
#
# Whose choice does a layer of `flash` follow? Write a function from the layer's number to its index source, without
# `plan`; `None` for a layer with a window only.
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
# They stand in the next cell, which is folded in JupyterLab. It also shows that each check refuses a wrong answer.
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
# - Four of 40 layers write, eight choose, 38 read. A reader that does not write or choose follows the latest that did.
# - Layers that choose differently can share a choice, as long as what matters is in it. A wrong choice costs answers.
# - Some layer must read: without entries the toy guesses.
#
# [Technical report](https://arxiv.org/abs/2609.19969): §2.3. Next: **lesson 05**, how a choice is made.

# %% [markdown]
# ## 中文小结
#
# 1. 38 层要读远处的条目，只有四层写条目，其余各层读别层写下的。
# 2. Full 层写并选，Reindex 层只重新选，Reuse 层两样都沿用。
# 3. 两层所选的条目只有一半相同，但让后面的层沿用第一层的选择，答案几乎不变：要紧的那一条都在里面。
# 4. 把读取条目的层全部换成只有滑动窗口，玩具模型就只能瞎猜。
# 5. 共享选择省下的索引计算比候选池还多；注意力本身并没有省。
