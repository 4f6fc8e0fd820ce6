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
# # How far does a token see when every layer looks only a few tokens back?
#
# **Lesson 02, the sliding window and the attention sink.** 30 minutes to read, about a minute to run on one CPU thread,
# no GPU.
#
# Afterwards you can
# 1. compute attention over a window by hand, its sink included, and count its bytes and its work;
# 2. say how far a stack of windows reaches, and test that on a real model;
# 3. measure what window and sink are worth to a trained model.

# %%
import math

import torch

import tinyds41 as ds
from tinyds41 import ops
from tinyds41.cost.flops import decode_cost, flops_per_row
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_02 import check_border, check_bytes, check_sink
from tinyds41.formats import Rows
from tinyds41.show.distance_plots import plot_by_distance
from tinyds41.show.index_observations import attention_shares
from tinyds41.show.run_plots import LossPoint, plot_loss
from tinyds41.show.setting_plots import plot_quality_by_setting
from tinyds41.train.examples import example_record
from tinyds41.train.note import Note, known_by_distance, note_config
from tinyds41.train.tasks import needle_config

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run
_ = torch.manual_seed(0)

# %% [markdown]
# ## Feel the problem
#
# Picture a desk on which only the last pages of a book have room. Ordinary attention has no such limit: in each layer
# it compares a token with every earlier one, and keeps a *row* of numbers for each of them. In `flash`, the config of
# the released model, a layer keeps rows of the last 128 tokens, its *window*, and drops older ones.

# %% [markdown]
# **Guess first:** if all layers kept and read all rows, how would one token's work in attention compare with its work
# in all weight matrices together, at a context of a million tokens?

# %% tags=["nbval-check-output"]
flash = ds.Config.preset("flash")
layers, window, heads = flash.num_hidden_layers, flash.sliding_window, flash.num_attention_heads
cache, cost = kv_bytes(flash), decode_cost(flash)
row, (_, per_row) = cache.of("window")[0].row_bytes, flops_per_row(flash)
print(f"{layers} layers, {heads} heads, window {window}; a row: {flash.head_dim} channels of one byte and"
      f" {row - flash.head_dim} bytes of scales, {per_row:,} raw FLOPs to attend to it")
for context in (2**12, 2**16, 2**20):
    kept, near = layers * context, layers * min(context, window)
    print(f"{context:>9,} tokens: all rows {kept * row / 1e9:6.3f} GB, work {kept * per_row / cost.linear:6.2f} of the"
          f" matrices'; windows {near * row / 1e6:.1f} MB, work {near * per_row / cost.linear:.3f}")
assert cache.window_bytes == layers * window * row == 2_703_360
assert per_row == heads * flash.head_dim * 2 * 2  # a score and a sum, each a product and an addition per channel

# %% [markdown]
# A FLOP is one multiplication or addition, *raw* if all count alike. At a million tokens attention would be more than a
# hundred times the work of all matrices. All windows together take 2.7 MB and a fiftieth of that work, at any length.
# (Scales belong to rounding to 8 bits: lesson 06.)

# %% [markdown]
# > **Correction.** Popular accounts say that attention's cache grows with the square of the context. It grows linearly:
# above, 16 times the tokens are 16 times the bytes. Only the work on a whole text grows with the square.
#
# But what can a token still know of rows that were dropped?

# %% [markdown]
# ## One equation
#
# A layer attends with several *heads*. A head's *query* $q$ says what it looks for; its score $s_i$ with row $v_i$ of
# the window, how well that row fits. Its output $o$ mixes the rows:
#
# $$s_i = \frac{q \cdot v_i}{\sqrt C}, \qquad
# o = \frac{\sum_i e^{s_i}\, v_i}{e^{\text{sink}} + \sum_i e^{s_i}}$$
#
# $C$ is the number of channels. A token has one row: its key and its value are the same numbers, for all heads (64 in
# `flash`). Each head has its own $q$ and its own learned number, the **sink**.

# %% [markdown]
# Each row weighs $e^{s_i}$ divided by the denominator; what is missing to 1 is the sink's share. It belongs to no token
# and has no value. Without a sink the weights would add up to 1, whatever the window holds: a head must take in
# *something*. With it, a head that finds nothing can answer with almost nothing.

# %% [markdown]
# ## Naive version
#
# One query at a time. A query at position $p$ sees $W$ positions, $p - W + 1$ to $p$, itself included; at the start of
# a text, those that exist. Left out: 8-bit rounding, and the rotation by position that comes at the end of the lesson.

# %%
def attend(queries, rows, sinks, window):
    """queries [positions, heads, C], rows [positions, C], sinks [heads]: the equation, one query after another."""
    outputs = torch.zeros_like(queries)
    for position, heads in enumerate(queries):
        seen = rows[max(0, position - window + 1) : position + 1]
        for head, query in enumerate(heads):
            weights = (seen @ query / math.sqrt(len(query))).exp()
            outputs[position, head] = weights @ seen / (sinks[head].exp() + weights.sum())
    return outputs

# %% [markdown]
# Does the library do the same? It cuts a text into bands, so that it never compares all pairs. Lengths that no window
# divides, windows of one token, a window longer than the text:

# %% tags=["nbval-check-output"]
for length, size in ((1, 4), (3, 4), (23, 4), (23, 1), (23, 64)):
    queries, rows, sinks = torch.randn(length, 3, 8), torch.randn(length, 8), torch.randn(3)
    first = (torch.arange(length) - size + 1).clamp(min=0)[None]  # the first position that each query sees
    found = ops.attend(queries[None], ops.Window(Rows(rows[None]), first, size), None, sinks)[0]
    assert torch.allclose(attend(queries, rows, sinks, size), found, atol=1e-5)  # float32 sums in another order
    print(f"{length:2} tokens, window {size:2}: equal")

# %% [markdown]
# ## How far does a change reach?
#
# With a window of 4 a layer looks three tokens back. But those tokens had looked back themselves, one layer earlier.
#
# We take four layers of windows with random weights. (All else in a layer, experts for one, works on each token by
# itself.) Position 8 gets another token. Behind it we watch the *logits*, the model's scores for the next token.
#
# **Guess first:** what is the last distance at which anything changes? How large is the change there, compared with
# distance 1?

# %%
task = Note()  # words to make texts of: 16 notes, 16 fillers; more on it below


def moved(model, texts, place=8):
    """What another token at `place` does, by distance behind it: the largest change of a logit, mean of all texts."""
    other = texts.clone()
    other[:, place] = task.first_note + (texts[:, place] - task.first_note + 1) % task.n_notes
    with torch.no_grad():
        change = (model(texts) - model(other)).abs().amax(-1).mean(0)[place:]
    # Less is rounding: experts work on tokens in batches, and another batch adds in another order.
    return {distance: value for distance, value in enumerate(change.tolist()) if value > 1e-10}

# %%
texts = torch.randint(task.first_filler, task.vocab_size, (16, 48))
texts[:, 8] = task.first_note
effects = {}
for size in (4, 8):
    untrained = ds.Model(note_config(task, sliding_window=size), seed=0, dtype=torch.float64)
    effects[f"window {size}"] = moved(untrained, texts)
ends = {name: max(effect) for name, effect in effects.items()}
for name, end in ends.items():
    print(f"{name}: the last change is at distance {end}, {effects[name][end] / effects[name][1]:.4f} of that at 1")

# %%
ax = plot_by_distance(effects, borders=ends, log=True, title="Outputs of the untrained toy, one token changed",
                      ylabel="largest change of a logit")
assert ends == {"window 4": 4 * 3, "window 8": 4 * 7}
assert all(effects[name][end] < 0.1 * effects[name][1] for name, end in ends.items())

# %% [markdown]
# The border (dashed) is exact: $L$ layers with windows of $W$ reach $L(W-1)$ tokens back. Beyond, nothing *can* have
# an influence. Just before it, little has. A likely reason: from layer to layer one single chain of steps leads there,
# each as long as it can be; to nearer tokens there are many.
#
# The figure does not show whether a *trained* model gets that far. Nobody asked this one to carry anything.

# %% [markdown]
# ## A task that asks at every distance
#
# A text of fillers (16 different tokens, all shown as dots) holds one *note*. From there on, the model must say the
# note at every token. It is another note in each text, so weights cannot know it: it must be carried.

# %% tags=["nbval-check-output"]
words = ["-"] * 4 + [f"n{i}" for i in range(16)] + ["."] * 16
ids, _, wanted = task.batch(step=0, batch_size=1, length=20, seed=3)
print("reads:", " ".join(f"{words[i]:>3}" for i in ids[0, :-1]))
print("says: ", " ".join(f"{words[i] if i >= 0 else '':>3}" for i in wanted[0]))
assert task.n_notes == task.n_fillers == 16 and (wanted[0, -1] == ids[0]).any()

# %% [markdown]
# ## Train a tiny one
#
# Four layers whose attention has windows of four and nothing else: the border lies at 12. Texts have 32 tokens, the
# note is in their first half, so many questions lie beyond the border.

# %%
toy = note_config(task)
common = {"batch_size": 32, "length": 32, "learning_rate": 3e-3, "seed": 0}
model = ds.Model(toy, seed=0)
history = ds.train(model, task, steps=120, **common)
points = [LossPoint(step, "train", loss) for step, loss in enumerate(history.losses, 1)]
ax = plot_loss(points, model="the toy, windows of 4", vocab_size=task.n_notes)
assert sum(history.losses[-10:]) / 10 < 1.8

# %% [markdown]
# The loss stays well above zero: nobody can know the answers beyond the border.
#
# **Guess first:** new texts of 96 tokens. Draw the share of right answers against the distance behind the note, from 0
# to 48. Then draw it for the same weights with windows of 2, of 8 and of 16 while answering. (Lesson 00 gave a trained
# toy other windows, too.)

# %%
known = {size: known_by_distance(ds.variant(model, sliding_window=size), task, length=96) for size in (4, 8, 2, 16)}
ax = plot_by_distance(
    {f"window {size}": curve for size, curve in known.items()}, ylabel="share of right answers",
    borders={f"window {size}": 4 * (size - 1) for size in (4, 8, 2)}, baseline=("chance", 1 / task.n_notes),
    title="Answers of the toy, trained with windows of 4")  # fmt: skip

# %%
for size, curve in sorted(known.items()):
    print(f"window {size:2}, border {4 * (size - 1):2}: right at "
          + ", ".join(f"{distance} {curve[distance]:.2f}" for distance in (4, 5, 12, 13, 22, 28, 29, 48)))
assert known[4][12] > 0.75 and known[4][13] < 0.25 and known[2][4] > 0.6 and known[2][5] < 0.25
assert min(known[8][distance] for distance in range(13, 21)) > 0.75 and known[8][29] < 0.25

# %% [markdown]
# **The surprise.** With windows of 8 the toy answers from distances where it never could, from 13 to 20 nearly always.
# The border moves out, and answers follow, though they fade before the new one. (That of windows of 16 is at 60,
# outside the picture.) Nobody trained this; in lesson 00, on text, twice the window made a toy *worse*.
#
# And at distance 12, the border itself, where random weights left hardly a trace, the trained toy still has the note.
#
# How? Let us see where attention goes.

# %% [markdown]
# ## What a layer does that finds nothing
#
# In 32 texts the note stands at position 20. For the token at each distance behind it: which part of the weight does
# the sink get, layer by layer? (Dashed: layer 0 sees 3 tokens back, layers 0 and 1 together 6, and so on.)

# %%
texts = torch.randint(task.first_filler, task.vocab_size, (32, 48))
texts[:, 20] = torch.randint(task.first_note, task.first_filler, (32,))
trace = ds.Trace("layers.*.attn.*")
with torch.no_grad():
    model(texts, trace=trace)
shares = {distance: attention_shares(trace, model, [20 + distance]) for distance in range(21)}

# %%
sunk = {f"layer {layer}": {distance: share[layer].sink for distance, share in shares.items()} for layer in range(4)}
ends = {name: 3 * (layer + 1) for layer, name in enumerate(sunk)}
ax = plot_by_distance(sunk, borders=ends, title="The sink's share of attention in the toy, layer by layer",
                      ylabel="share, mean of heads and texts")
for name, end in ends.items():
    at = sunk[name]
    print(f"{name}: {at[1]:.3f} at distance 1, {at[end]:.3f} at {end}, {at[end + 1]:.3f} at {end + 1}")
    assert at[end] < 0.55 and at[end + 1] > at[end] + 0.2

# %% [markdown]
# A staircase. Layer 0 attends to the note while the window holds it. At distance 6 layer 1 still takes in something,
# and of the four tokens in its window only the farthest can know the note, from layer 0. So it attends to *a token that
# found it*. And so on, each passing it on. Where nobody knows, most weight goes to the sink: the layer is nearly
# silent.

# %% [markdown]
# So a layer seems to look for a token that knows, not for a distance: that explains why in a wider window it finds one
# further back.
#
# What the staircase does not show: that text is read so. One note among fillers is the easiest case.

# %% [markdown]
# ## Take the sink away
#
# Sinks start at 0. **Guess first:** how far have 120 steps moved them? And if the trained toy loses its sinks (we set
# them to -10,000; $e$ to that is as good as 0), what happens to its answers?

# %%
def without_sinks(source, layers=range(4)):
    """The same weights, but no sinks in some layers."""
    state = {name: value.clone() for name, value in source.state_dict().items()}
    for layer in layers:
        state[f"layers.{layer}.attn.attn_sink"].fill_(-10_000)
    other = ds.Model(source.config, seed=0)
    other.load_state_dict(state)
    return other

# %%
def mean(curve, distances=range(1, 13)):
    """Share of right answers, over some distances."""
    return sum(curve[distance] for distance in distances) / len(distances)

# %%
largest = max(block.attn.attn_sink.abs().max().item() for block in model.layers)
robbed = known_by_distance(without_sinks(model), task)
print(f"the sink furthest from 0 is {largest:.3f} away")
print(f"right at 10 to 12: {mean(known[4], range(10, 13)):.2f} with sinks, {mean(robbed, range(10, 13)):.2f} without")
assert largest < 0.2 and mean(robbed, range(10, 13)) < 0.5 < mean(known[4], range(10, 13))

# %%
alone = [mean(known_by_distance(without_sinks(model, [layer]), task)) for layer in range(4)]
for layer, right in enumerate(alone):
    print(f"without the sinks of layer {layer} alone: right at 1 to 12 {right:.3f}, with all {mean(known[4]):.3f}")
assert alone[0] < alone[3] - 0.07

# %% [markdown]
# **It hurts**, though training has moved the sinks by a few hundredths only. It was queries and rows that arranged
# themselves around them: fillers together weigh less than the sink, a token that knows weighs more (the staircase).
#
# Where a single layer loses its sinks, layer 0 misses them most and layer 3 hardly at all. A likely reason, not tested:
# what the first layer takes in without need, all others read.

# %% [markdown]
# Is the sink necessary, then? That is another question. **Guess first:** what does a toy learn that never had one?

# %%
other = without_sinks(ds.Model(toy, seed=0))
_ = ds.train(other, task, steps=120, **common)
assert all(block.attn.attn_sink.max().item() < -9_000 for block in other.layers)  # they stay away
grown = known_by_distance(other, task)
curves = {"trained with sinks": known[4], "sinks taken away": robbed, "trained without": grown}
ax = plot_by_distance(curves, title="Answers of two toys, windows of 4", ylabel="share of right answers",
                      borders={"trained with sinks": 12}, baseline=("chance", 1 / task.n_notes))
print("right at 1 to 12:", ", ".join(f"{name} {mean(curve):.3f}" for name, curve in curves.items()))
assert mean(grown) > 0.85 and mean(grown) > mean(robbed) + 0.07

# %% [markdown]
# **A miss.** The toy that never had sinks answers about as well; how it does so we did not look at. To take a part from
# a trained model shows that *this* model uses it. It does not show that no model can learn without it.

# %% [markdown]
# ## The knob
#
# The window again, now step by step, on the toy with sinks. With windows of $W$ it can know the note at $4(W-1)+1$ of
# the 49 distances from 0 to 48, and is right by chance at the others: that is the second curve.

# %%
part, limit = {}, {}
for size in (1, 2, 3, 4, 6, 8, 12, 16):
    curve = known.get(size) or known_by_distance(ds.variant(model, sliding_window=size), task)
    reached = min(1, (4 * (size - 1) + 1) / 49)
    part[size], limit[size] = sum(curve.values()) / 49, reached + (1 - reached) / task.n_notes
ax = plot_quality_by_setting({"right": part, "the border allows": limit}, setting="sliding_window", trained=4,
                             model="the toy", ylabel="share of answers, distances 0 to 48")  # fmt: skip
print("missing: " + ", ".join(f"window {size} {limit[size] - part[size]:.3f}" for size in part))
assert part[8] > part[4] + 0.15 > part[2] + 0.25 and limit[16] - part[16] > 0.02

# %% [markdown]
# **A second miss.** In windows of 12 and 16 answers are missing that the border allows. At 16 every distance here lies
# before the border, and still the far answers fade. (Below zero: more were right than that. Behind the border the toy
# is right somewhat more often than by chance. With so few texts that may be luck.)
#
# A suspect: four times as many fillers in the window, each with a small weight. How much is that together, where there
# is nothing to find?

# %%
for size in (4, 16):
    asked, trace = ds.variant(model, sliding_window=size), ds.Trace("layers.*.attn.*")
    with torch.no_grad():
        asked(texts, trace=trace)
    quiet = attention_shares(trace, asked, [19])  # the token before the note, behind 19 fillers
    print(f"window {size:2}: fillers take " + ", ".join(f"{s.window:.3f} in layer {s.layer}" for s in quiet))
    assert (quiet[0].window > 0.2) == (size == 16) and (quiet[3].window > 0.35) == (size == 16)

# %% [markdown]
# Every layer takes in more of them. **Guess first:** if that is the fault, what would louder sinks do? Raised by
# $\ln 4$, so that $e^{\text{sink}}$ is four times as large, they face four times as many fillers. And what would they
# do with windows of 4?

# %%
def louder(size, by):
    """The toy with another window, and all its sinks raised."""
    changed = {name: value + by if name.endswith("attn_sink") else value for name, value in model.state_dict().items()}
    asked = ds.Model(toy.replace(sliding_window=size), seed=0)
    asked.load_state_dict(changed)
    return known_by_distance(asked, task)


for size, far in ((4, range(1, 13)), (16, range(37, 49))):
    plain, raised = mean(known[size], far), mean(louder(size, math.log(4)), far)
    print(f"window {size:2}: right at {far[0]} to {far[-1]} {plain:.3f}, with louder sinks {raised:.3f}")
    assert size == 4 or raised > plain + 0.02

# %% [markdown]
# Louder sinks bring back a part of the far answers, without any training. That is what one expects if the fillers are
# one cause. What the rest is due to we did not test: perhaps distances inside a window that training never showed.

# %% [markdown]
# ## What windows cannot do
#
# Now a toy whose layers 2 and 3 have *entries* beside the window: one row for every two tokens read so far, however
# far back, of which 16 are fetched. (Lesson 05 says how.) It comes with the package, trained as the others were.
#
# **Guess first:** after training, what hurts more: no entries, or windows of a single token?

# %%
both = ds.example("entries")  # trained before, by the command printed below
assert both.config == needle_config(task, sliding_window=4)
names = ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id")
cuts = {"uncut": {}, "windows of 1": {"sliding_window": 1}, "no entries": {name: getattr(toy, name) for name in names}}
curves = {name: known_by_distance(ds.variant(both, **cut), task) for name, cut in cuts.items()}
ax = plot_by_distance(curves, title="Answers of a toy with windows of 4 and entries", ylabel="share of right answers",
                      baseline=("chance", 1 / task.n_notes))
print(example_record("entries")["command"])
for name, curve in curves.items():
    print(f"{name:12}: right at 1 to 12 {mean(curve):.3f}, at 13 to 48 {mean(curve, range(13, 49)):.3f}")
assert mean(curves["uncut"], range(13, 49)) > 0.9 and mean(curves["no entries"], range(13, 49)) < 0.25

# %% [markdown]
# Entries answer at every distance asked, after 70 steps instead of 120. Without them this toy is worse than the first
# one even where windows reach: it never had to pass a note on.
#
# **A third miss:** here the windows are worth little. One note is easily found among entries. The figure does
# not show what neighbours are worth in text, where lesson 00 cut the window and lost.

# %% [markdown]
# ## What it costs, and what it saves
#
# A full window adds no bytes per token, and the candidate pool of lesson 00 does not concern it. It costs a constant.
#
# **Guess first:** entries of `flash`, and the keys that find them, grow by 890 bytes per token. After how many tokens
# do they outweigh all windows? And where a layer attends to a full window and to fetched entries, which part of the
# rows is window?

# %% tags=["nbval-check-output"]
print(f"windows {cache.window_bytes:,} bytes, entries {cache.bytes_per_token} bytes per token:"
      f" equal after {float(cache.window_bytes / cache.bytes_per_token):,.0f} tokens")
print(f"a key and a value for each head would be {2 * heads} times as many numbers as the one shared row")
both_parts = window + flash.index_topk
print(f"{window} of {both_parts} rows attended to are window: {window / both_parts:.0%}")
near = layers * window * per_row
for context in (2**12, 2**20):
    work = cost.at(context, "raw")
    print(f"{context:>9,} tokens: windows are {near / work.attention:.0%} of attention, {near / work.total:.1%} of all"
          " raw work")
print(f"windows alone would reach {layers * (window - 1):,} tokens back")
assert round(cache.window_bytes / cache.bytes_per_token) == 3037 and layers * (window - 1) == 5080

# %% [markdown]
# Windows alone would end at 5,080 tokens, about a two-hundredth of a million. So `flash` has both: windows for what is
# near, entries for what is far.
#
# What we left out: some channels of a row are rotated by its position before it is stored, those of a query likewise.
# So a score depends on the distance. But the same numbers are values; so every output is turned back by the position of
# its query.

# %% [markdown]
# ## Exercise 1
#
# Make a config of windows alone, of five layers or more, whose border lies at a distance of exactly 30. The check
# builds the toy and measures.
#
# <details><summary>Hint</summary>
#
# `note_config(task, layers=..., sliding_window=...)`. Which products are 30, and of what?
#
# </details>

# %%
bordered = ...  # border: 30
check_border(bordered)

# %% [markdown]
# ## Exercise 2
#
# How many bytes do all windows of `flash` hold after $n$ tokens? Write it as a function of $n$. Before a window is
# full, only the rows of tokens that have come count.
#
# <details><summary>Hint</summary>
#
# Layers, rows, bytes of a row: all three are printed at the top. Only one of them depends on $n$.
#
# </details>

# %%
window_bytes = ...  # such as: lambda n: 528 * n
check_bytes(window_bytes)

# %% [markdown]
# ## Exercise 3
#
# Which part of the weight, between 0 and 1, does the sink take? Write it as a function of the list of scores $s_i$,
# which may be empty, and the sink. Scores may be large, and `math.exp(900)` fails.
#
# <details><summary>Hint</summary>
#
# Numerator and denominator may be divided by the same number, such as $e$ to the largest of all.
#
# </details>

# %%
sink_share = ...  # such as: lambda scores, sink: 0.0
check_sink(sink_share)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
def share_of_sink(scores, sink):
    top = max([sink, *scores])
    return math.exp(sink - top) / (math.exp(sink - top) + sum(math.exp(score - top) for score in scores))


check_border(note_config(task, layers=6, sliding_window=6))
check_bytes(lambda n: 40 * 528 * min(n, 128))
check_sink(share_of_sink)
assert refuses(check_border, note_config(task, layers=6, sliding_window=5)) and refuses(check_bytes, lambda n: 528 * n)
assert refuses(check_sink, lambda scores, sink: math.exp(sink) / sum(math.exp(score) for score in scores))

# %% [markdown]
# ## Recap
#
# - A layer attends to the last $W$ rows: one per token, key and value in one, for all heads. Bytes and work are
#   constant: 2.7 MB in `flash`.
# - $L$ layers reach $L(W-1)$ tokens back, not one further. A trained toy carries a note that far.
# - Given twice the window, it answers from further back: it seems to look for a token that knows, not a distance.
# - A sink lets a layer be silent. Our toy trained with sinks needs them; the one trained without does not.

# %% [markdown]
# [Technical report](https://arxiv.org/abs/2609.19969): §2.3. Before it: **lesson 00**, the tour. Next:
# **lesson 03**, why a prompt needs only half of the layers.

# %% [markdown]
# ## 中文小结
#
# 1. 每层只精确地看最近 W 个词元；键值是同一行，所有头共用；`flash` 的窗口共占 2.7 MB，与长度无关。
# 2. L 层窗口最远看到 L(W-1) 个词元之前，再远就不行；训练过的模型能把信息带到这个边界。
# 3. 每层找的看来是“知道答案的词元”，不是固定的距离：窗口加倍，不用再训练，答得更远。
# 4. 注意力汇让找不到东西的层保持沉默；训练后拿掉它很伤，没有它也学得会。
# 5. 注意力缓存是线性增长，不是平方；远处要靠全局条目。
