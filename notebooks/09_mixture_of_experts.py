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
# # Why store 552 billion weights if a token uses 16 billion?
#
# **Lesson 09, mixture of experts and balance.** 30 minutes to read, about a minute to run on one CPU thread, no GPU.
#
# Afterwards you can
# 1. compute by hand which experts a token visits, and with which weights;
# 2. say what a balance rule is for, and measure what it changes in a toy;
# 3. find out what experts have divided among themselves, and what each of them is worth.

# %%
import copy
import math

import torch
import torch.nn.functional as F

import tinyds41 as ds
from tinyds41.cost.flops import decode_cost
from tinyds41.cost.parameters import count_parameters
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_09 import check_dropped, check_expert_bytes, check_moved
from tinyds41.show.cost_plots import plot_parameters
from tinyds41.show.observations import LOAD_NAMES, expert_loads
from tinyds41.show.run_plots import plot_curves, plot_expert_load
from tinyds41.show.setting_plots import plot_loss_by_setting
from tinyds41.train.corpus import Corpus, data_folder, documents
from tinyds41.train.optim import BIAS_STEP

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run
_ = torch.manual_seed(0)

# %% [markdown]
# ## Feel the problem
#
# Picture a firm of hundreds of *analysts* and one *executive*. A file goes to a few analysts who suit it, and always
# to the executive. The firm knows much; each file costs little.
#
# In a *mixture of experts* an analyst is a **routed expert**, a small network; the executive is the **shared expert**.
# A **router** picks analysts for each token, in each layer anew.
#
# **Guess first:** which part of `flash`, Engram's tables aside (lesson 00), are routed experts? Which part of those
# does a token use?

# %% tags=["nbval-check-output"]
flash = ds.Config.preset("flash")
parameters = count_parameters(flash)
routed = parameters["routed experts"]
print(f"a layer: {flash.n_routed_experts} routed experts, {flash.num_experts_per_tok} visited; one shared")
print(f"all but Engram {parameters.backbone / 1e9:.2f}B, a generated token uses {parameters.active_decode / 1e9:.2f}B")
print(f"routed experts {routed.stored / 1e9:.2f}B ({routed.stored / parameters.backbone:.1%}),"
      f" a token uses {routed.decode / 1e9:.2f}B of them ({routed.decode / routed.stored:.2%})")
assert round(parameters.backbone / 1e9) == 552 and round(parameters.active_decode / 1e9) == 16

# %%
ax = plot_parameters(parameters, model="flash")

# %% [markdown]
# A bar is what is stored, an orange mark what one token uses. The scale is logarithmic: the routed experts' mark stands
# far left of their bar's end. (The bar's percentage is smaller than 98.6 %, for here Engram's rows count too.)
#
# All that is stored helps only if tokens spread over the experts. Large models spread experts over many processors. If
# all tokens visited the same six, the other 378 would be dead weight, and the processors that hold them would idle.

# %% tags=["nbval-check-output"]
print(f"{flash.n_routed_experts - flash.num_experts_per_tok} experts that one token does not visit")
print(f"stored {parameters.backbone / parameters.active_decode:.0f} times what a token uses")

# %% [markdown]
# ## One equation
#
# In a layer a token is a vector $x$. Each expert $e$ gives it a score; $w_e$ is a row of the router's matrix:
#
# $$s_e = \sqrt{\ln(1 + \exp(w_e \cdot x))}$$
#
# The $A$ experts with the highest $s_e + b_e$ are chosen (six in `flash`). The layer's output is
#
# $$y = \text{shared}(x) + \sum_{e\ \text{chosen}} 1.5\, \frac{s_e}{\sum_{\text{chosen}} s} \;\text{expert}_e(x)$$
#
# $b_e$ is the expert's **bias**. It takes part in the choice, not in the weights: a pushed expert must not shout
# louder. $1.5$ is `routed_scaling_factor`.

# %% [markdown]
# Every expert, the shared one too, has three matrices. Two vectors are made of $x$ and multiplied number by number:
#
# $$\text{expert}(x) = W_2\,\big(\text{silu}(\min(W_1 x, 10)) \cdot \text{clamp}(W_3 x)\big)$$
#
# $\text{silu}(z) = z / (1 + e^{-z})$ lets positive numbers pass and little of negative ones. Clamp cuts at $-10$ and
# $10$, so no product grows without bounds.

# %% [markdown]
# Nobody trains $b$ by a gradient. There is a **balance rule**: after each training step an expert that had more visits
# than the mean gets a slightly lower bias, one that had fewer a slightly higher one. A bias always moves by the same
# amount, 0.001 in the report.
#
# ## Naive version
#
# One token after another, one expert after another.

# %%
def expert(x, w1, w2, w3, limit):
    """Three matrices; the two factors in the middle are limited."""
    return w2 @ (F.silu((w1 @ x).clamp(max=limit)) * (w3 @ x).clamp(-limit, limit))


def route(x, rows, bias, n_chosen, scaling):
    """Expert to weight, for one token: chosen with the bias, weighed without it."""
    scores = [math.sqrt(math.log1p(math.exp(float(row @ x)))) for row in rows]
    order = sorted(range(len(rows)), key=lambda e: -(scores[e] + float(bias[e])))
    chosen = sorted(order[:n_chosen])
    total = sum(scores[e] for e in chosen)
    return {e: scaling * scores[e] / total for e in chosen}


def mixture(x, ffn, config):
    """Shared expert plus weighed routed ones; `ffn` holds the weights."""
    stacks, shared, limit = ffn.experts, ffn.shared_experts, config.swiglu_limit
    out = expert(x, shared.w1.weight, shared.w2.weight, shared.w3.weight, limit)
    weights = route(x, ffn.gate.weight, ffn.gate.bias, config.num_experts_per_tok, config.routed_scaling_factor)
    for e, weight in weights.items():
        out = out + weight * expert(x, stacks.w1[e], stacks.w2[e], stacks.w3[e], limit)
    return out

# %% [markdown]
# What does a bias do? Four experts, two chosen. The token's own order is 0, 1, 2, 3; then expert 3 is pushed.

# %% tags=["nbval-check-output"]
rows, one = torch.tensor([[2.0], [1.0], [0.0], [-1.0]]), torch.ones(1)
for bias in ([0, 0, 0, 0], [0, 0, 0, 1]):
    weights = route(one, rows, torch.tensor(bias), n_chosen=2, scaling=1.5)
    print(f"bias {bias}: " + ", ".join(f"expert {e} weighs {weight:.3f}" for e, weight in weights.items()))
assert sorted(weights) == [0, 3] and weights[3] < weights[0] and abs(sum(weights.values()) - 1.5) < 1e-9

# %% [markdown]
# Pushed in, expert 3 is heard with the small weight that its own score gives it. The sum stays the same.
#
# ## The toy
#
# Two layers of 16 routed experts, of which a token visits two. Attention here has sliding windows only: the lesson is
# about the other half of a layer. The toy reads two kinds of text: Shakespeare's plays, and the Jargon File, a
# dictionary of programmers' slang.

# %%
tokenizer = ds.Tokenizer.load(data_folder())
kinds = ("plays", "jargon")
training = Corpus.from_texts(tokenizer, [text for kind in kinds for text in documents(kind, "train")])
held_out = {kind: Corpus.from_texts(tokenizer, documents(kind, "held_out")) for kind in kinds}
windows_only = {"compress_ratios": (0, 0), "kv_source_layer_ids": (), "index_source_layer_ids": (),
                "candidate_source_layer_id": None, "num_nextn_predict_layers": 0,
                "engram_layer_ids": (), "engram_num_embeddings": ()}  # fmt: skip
toy = ds.Config.preset("toy", num_hidden_layers=2, hidden_size=64, n_routed_experts=16, moe_intermediate_size=32,
                       initializer_range=0.06, **windows_only)  # fmt: skip
print(f"{toy.n_routed_experts} experts, {toy.num_experts_per_tok} visited; {len(training):,} tokens to learn from")

# %% [markdown]
# Do the naive version and the library agree? We give layer 1 random biases, large enough to change choices, and print
# the two experts of each of twelve tokens, with these biases and without.

# %%
model, kept = ds.Model(toy, seed=0), []
ffn = model.layers[1].ffn
with torch.no_grad():
    ffn.gate.bias.uniform_(-0.5, 0.5)
    ffn.register_forward_hook(lambda module, given, made: kept.append((given[0][0], made[0])))
    model(held_out["plays"].ids[:12].long()[None])
    [(x, theirs)] = kept
    mine = torch.stack([mixture(token, ffn, toy) for token in x])
    pairs = [[list(route(token, ffn.gate.weight, bias, 2, 1.5)) for token in x] for bias in (ffn.gate.bias, [0] * 16)]
print(f"pushed   {pairs[0]}\nunpushed {pairs[1]}")
assert pairs[0] == ffn.gate(x[None])[1][0].tolist() != pairs[1]
assert torch.allclose(mine, theirs, atol=1e-5)  # float32 sums of a few dozen products, in another order
print(f"outputs: largest difference {(mine - theirs).abs().max():.0e}")

# %% [markdown]
# ## Train it, with the rule and without
#
# The same toy twice, the same batches. Once all biases stay 0, once each step moves them. The report's amount suits a
# run of very many steps. In a run as short as ours it could not move any bias far, so we take ten times as much. The
# report adds a small balance *loss*; we leave it out, so that one thing differs.

# %% tags=["nbval-check-output"]
STEPS, RATE = 84, 10 * BIAS_STEP
for name, rate in (("the report", BIAS_STEP), ("here", RATE)):
    print(f"{name}: {rate} a step; in {STEPS} steps a bias moves by {STEPS * rate:.1f} at most")
assert (BIAS_STEP, RATE) == (0.001, 0.01)

# %% [markdown]
# An expert's **load** is its share of all visits, divided by an even share (a sixteenth). 1 is even. The most possible
# is 8: every token visits the expert, and one other.
#
# **Guess first:** which load does the busiest expert reach without the rule? And how much higher is the loss then?

# %%
common = {"batch_size": 8, "length": 64, "learning_rate": 6e-3, "balance_weight": 0.0, "record_every": 5}


def teach(config, seed, bias_rate):
    """A trained toy and its history."""
    model = ds.Model(config, tokenizer=tokenizer, seed=seed)
    return model, ds.train(model, training, steps=STEPS, seed=seed, bias_rate=bias_rate, **common)


def loss(model):
    """Held-out loss, the mean of both kinds of text."""
    found = [ds.evaluate(model, held_out[kind], length=64, batch_size=32, max_tokens=2_000) for kind in kinds]
    return sum(one.loss for one in found) / 2


# %%
without, free_run = teach(toy, 0, bias_rate=0)
balanced, ruled_run = teach(toy, 0, bias_rate=RATE)

# %%
def busiest(history):
    """By step, the highest load in any layer."""
    return {record["step"]: torch.tensor(record["load"]).max().item() * 16 for record in history.records}


curves = {"without": busiest(free_run), "with the rule": busiest(ruled_run)}
ax = plot_curves(curves, xlabel="step", ylabel="load of the busiest expert", model="the toy", baseline=(1, "even"))
last = [curve[max(curve)] for curve in curves.values()]
print(f"the busiest load at the end: {last[0]:.1f} without, {last[1]:.1f} with the rule")
assert last[0] > 5 and last[1] < 2.5

# %% [markdown]
# Within a few steps nearly all tokens of some layer visit the same expert: the experts *collapse*. Without the rule it
# stays so. With it the load comes down only late in the run: biases move slowly, and until they outgrow
# the gaps between scores they change no choice. (Why tokens flock together so early we did not measure.)
#
# Here is every expert after training, on held-out text. Mind the two colour scales.

# %%
ids = torch.cat([held_out[kind].ids[:2048].long().view(16, 128) for kind in kinds])  # 16 rows of each kind


def watch(model, ids=ids):
    """A trace of who was visited."""
    trace = ds.Trace(*LOAD_NAMES)
    with torch.no_grad():
        model(ids, trace=trace)
    return trace


ax = plot_expert_load(expert_loads(watch(without), toy), model="the toy without the rule")

# %%
ax = plot_expert_load(expert_loads(watch(balanced), toy), model="the toy with the rule")

# %% [markdown]
# ## What did it cost?
#
# Now the loss, in nats per token of held-out text. For comparison we train a toy with only *two* routed experts, which
# every token visits: the same work per token, an eighth of the routed weights, nothing to balance. It is quick, so we
# train it twice: its second seed (other first weights, other batches) shows what chance alone can do.

# %%
few = toy.replace(n_routed_experts=2)
whole = {"without": loss(without), "with the rule": loss(balanced)}
losses = {**whole, **{f"two experts, seed {seed}": loss(teach(few, seed, 0)[0]) for seed in (0, 1)}}
for name, found in losses.items():
    print(f"{name:19} {found:.3f}, {found - whole['with the rule']:+.3f}")
assert max(losses.values()) - min(losses.values()) < 0.2

# %% [markdown]
# **The surprise.** Most experts idle, and the loss hardly tells: all four are within a few hundredths of a nat, and so
# far apart are two toys that differ by their seed alone. Which rule is better, these numbers cannot say.
#
# Nor can they say that 16 experts beat two. After so few tokens the other 14 bring nothing that stands out from the
# seeds. That would explain why it costs little when they collapse; it does not prove it.

# %%
read = STEPS * common["batch_size"] * common["length"]
weights = toy.num_hidden_layers * 3 * toy.hidden_size * toy.moe_intermediate_size
print(f"{read:,} tokens read; routed weights {16 * weights:,}, in the toy with two experts {2 * weights:,};"
      f" {16 - 2} experts of a layer are what it lacks")

# %% [markdown]
# What this does not show: that collapse is harmless. The toy with the rule was uneven itself for most of its short run.
# And a model with more to learn than two experts can hold may well miss the others. We did not measure that.
#
# ## What balance is for
#
# Suppose that each expert has a processor of its own, and a layer is done when its busiest expert is. Then a layer
# takes as long as the busiest load says: at 1 nobody waits.

# %%
def loads(model, ids=ids):
    """The load of each expert: layers by experts."""
    visits = torch.tensor([row.tokens for row in expert_loads(watch(model, ids), model.config)]).float().view(2, -1)
    return visits / visits.mean(-1, keepdim=True)


waits = {name: loads(model).max(-1)[0] for name, model in (("without", without), ("with", balanced))}
for name, times in waits.items():
    print(f"{name:8} layers take {[round(t, 1) for t in times.tolist()]} times as long as even ones;"
          f" processors idle {1 - 1 / times.mean().item():.0%} of the time")
assert waits["without"].mean() > 2 * waits["with"].mean()

# %% [markdown]
# As many weights, as much work per token, and without the rule a step would take several times as long. That is a
# reason to balance even where the loss does not ask for it. (Computed from loads, not timed.)
#
# A load is a mean over many tokens. In small batches even the balanced toy is less even:

# %%
uneven = {n: loads(balanced, ids[:, :n]).max().item() for n in (1, 2, 4, 8, 16, 32, 64, 128)}
print("busiest load in a batch: " + ", ".join(f"{load:.1f} of {32 * n:,} tokens" for n, load in uneven.items()))
assert uneven[1] > uneven[128]

# %% [markdown]
# ## What have they divided among themselves?
#
# Analysts are often pictured as specialists for topics. Our toy read two kinds of text, so we can ask. Take two places
# of the held-out text. Two experts work at each; which part of them is the same? By chance it is 1 in 8.
#
# **Guess first:** where is it more? At the *same token in two kinds of text* (a play and the dictionary)? Or at *two
# different tokens in the same kind of text*?

# %%
def overlap(model, layer, same_token, same_kind, ids=ids[::2]):
    """Mean share of experts that pairs of held-out tokens have in common."""
    chosen = watch(model, ids)[f"layers.{layer}.ffn.experts"].flatten(0, 1)
    visits = F.one_hot(chosen, 16).sum(1).float()
    tokens, kind = ids.flatten(), torch.arange(len(visits)) // (len(visits) // 2)
    pairs = ((tokens[:, None] == tokens) == same_token) & ((kind[:, None] == kind) == same_kind)
    return ((visits @ visits.T)[pairs] / 2).mean().item()


for layer in range(2):
    word, topic = (overlap(balanced, layer, *which) for which in ((True, False), (False, True)))
    print(f"layer {layer}: same token, other kind {word:.2f}; other token, same kind {topic:.2f}; chance {2 / 16}")
    assert word > 0.4 > 0.3 > topic

# %% [markdown]
# > **Measured.** In popular accounts there are experts for mathematics or history. Here they are experts for *tokens*:
# a token keeps most of its experts from a play to a dictionary, and two different tokens of one kind of text share
# hardly more than by chance.
#
# Ours are two layers and two kinds of English. Whether experts of a large model know topics, this cannot say.

# %% [markdown]
# ## What is one expert worth?
#
# We take experts away from the trained toys: with a bias of -100 an expert is never chosen, and nothing else changes.
#
# **Guess first:** the four idlest of 16 in every layer go. What happens to the loss of each toy? And with the four
# busiest?

# %%
@torch.no_grad()
def bar(model, n, first="idlest"):
    """A copy in which no token may choose the n idlest (or busiest) experts of a layer."""
    other, order = copy.deepcopy(model), loads(model).argsort(descending=first == "busiest")
    for layer, experts in zip(other.layers, order, strict=True):
        layer.ffn.gate.bias[experts[:n]] = -100
    return other


lost = {name: {n: loss(bar(model, n)) - whole[name] for n in (4, 8, 12)}
        for name, model in (("without", without), ("with the rule", balanced))}  # fmt: skip
curves = {name: {0: 0.0, **by_n} for name, by_n in lost.items()}
ax = plot_curves(curves, xlabel="idlest experts taken away, of 16", ylabel="loss added, nats", model="the toy")
busy = {name: loss(bar(model, 4, "busiest")) - whole[name]
        for name, model in (("without", without), ("with the rule", balanced))}  # fmt: skip
for name in whole:
    print(f"{name:14} four idlest {lost[name][4]:+.3f}, four busiest {busy[name]:+.3f}")
assert abs(lost["without"][4]) < 0.03 and busy["without"] > 2 * lost["without"][4]

# %% [markdown]
# Without the rule the idlest are dead weight: stored, and not missed; the busiest four do the work. With it the idlest
# are missed too, here even more than the busiest. Mind the scale: the whole picture is a tenth of a nat.

# %% [markdown]
# ## Turn the knob
#
# `num_experts_per_tok`, the $A$ of the equation, in the toy *trained* with the rule: from one expert to all 16. The
# weights always add up to 1.5.
#
# **Guess first:** 16 experts are eight times the work of two. Is the loss lower or higher?

# %%
counts = (1, 2, 4, 8, 16)
by_count = {n: loss(ds.variant(balanced, num_experts_per_tok=n)) for n in counts}
ax = plot_loss_by_setting(by_count, setting="num_experts_per_tok", trained=2, model="the balanced toy")
assert by_count[16] > by_count[2] + 0.01

# %% [markdown]
# Higher, and gradually so. (One expert instead of two hardly matters.) Why? The additional experts may say something
# wrong. Or they only take weight from the two best, which had all of it. We can tell the two apart: keep two experts
# alone, and turn *them* down to the part of the weight that they have left among 16.

# %%
trace = ds.Trace("layers.*.ffn.weights")
with torch.no_grad():
    ds.variant(balanced, num_experts_per_tok=16)(ids, trace=trace)
weights = torch.cat([trace[f"layers.{layer}.ffn.weights"].flatten(0, 1) for layer in range(2)])
part = (weights.topk(2).values.sum(-1) / 1.5).mean().item()
quiet = loss(ds.variant(balanced, routed_scaling_factor=1.5 * part))
print(f"of 16 experts the two best hold {part:.2f} of the weight")
print(f"loss with two {by_count[2]:.3f}; with 16 {by_count[16]:.3f}; with two, turned down to that part {quiet:.3f}")
assert quiet - by_count[2] > 0.5 * (by_count[16] - by_count[2])

# %% [markdown]
# Mostly the second reason: two experts turned down lose most of what 16 lose. The other 14 together add little,
# neither sense nor nonsense.
#
# The curve does not show a toy *trained* with more experts per token; that one may learn to share.
#
# ## Take it away
#
# **Guess first:** what hurts more, to lose all 16 routed experts of each layer or the single shared one? And what if
# every token is sent to its expert's neighbour, the next in number?

# %%
@torch.no_grad()
def changed(change):
    """A copy of the balanced toy with every mixture changed."""
    other = copy.deepcopy(balanced)
    for layer in other.layers:
        change(layer.ffn)
    return loss(other) - whole["with the rule"]


def to_neighbours(ffn):
    ffn.gate.weight.copy_(ffn.gate.weight.roll(1, 0))
    ffn.gate.bias.copy_(ffn.gate.bias.roll(1, 0))


hurt = {"no routed experts": changed(lambda ffn: ffn.experts.w2.zero_()),
        "no shared expert": changed(lambda ffn: ffn.shared_experts.w2.weight.zero_()),
        "sent to the neighbour": changed(to_neighbours)}  # fmt: skip
print("\n".join(f"{name:22} {added:+.3f} nats" for name, added in hurt.items()))
assert min(hurt.values()) > 0.02

# %% [markdown]
# **It hurts.** The one shared expert, a seventeenth of the experts' weights, is worth more here than all 16 routed
# ones together. And experts that get each other's tokens are about as bad as none.
#
# **A miss.** "A pushed expert must not shout louder": what that rule does we have seen, that it helps we cannot show.
# Let us break it, and weigh with the bias too, in the trained toy:

# %%
def shout(ffn):
    gate, quiet_forward = ffn.gate, ffn.gate.forward

    def forward(x):
        scores, chosen, _ = quiet_forward(x)
        weights = (scores + gate.bias).gather(-1, chosen)
        return scores, chosen, 1.5 * weights / weights.sum(-1, keepdim=True)

    gate.forward = forward


louder, biases = changed(shout), torch.stack([layer.ffn.gate.bias for layer in balanced.layers])
print(f"weighed with the bias too {louder:+.4f} nats; biases {biases.min():.2f} to {biases.max():.2f}")
assert abs(louder) < 0.03 and biases.max() > 0.3

# %% [markdown]
# Next to nothing, though the largest biases are not small beside scores ($w_e \cdot x = 0$ gives a score of 0.83). The
# reason for the rule is that balancing then changes *who* speaks, not how loud those are who speak anyway. That is an
# argument, not a measurement.
#
# ## What it costs
#
# No byte of cache, and nothing in the candidate pool: experts keep nothing of earlier tokens. They cost weights and
# multiplications. At the released sizes (raw FLOPs, lesson 00; a GFLOP is a thousand million):

# %% tags=["nbval-check-output"]
one = routed.stored // (flash.num_hidden_layers * flash.n_routed_experts)
work = decode_cost(flash).at(2**12, "raw")
print(f"an expert {one:,} weights; per token {2 * routed.decode / 1e9:.1f} GFLOP of {work.total / 1e9:.1f} raw, "
      f"{2 * routed.decode / work.total:.0%}; all experts would be {2 * routed.stored / 1e9:.0f}")
for batch in (1, 8, 64, 256, 1024):
    met = 1 - (1 - flash.num_experts_per_tok / flash.n_routed_experts) ** batch
    print(f"{batch:5} tokens in a batch meet {met:6.1%} of a layer's experts, if they choose evenly and at random")
assert round(math.sqrt(math.log(2)), 2) == 0.83
assert one == 3 * flash.hidden_size * flash.moe_intermediate_size

# %% [markdown]
# A lone token reads few weights. A batch soon reads nearly all: with 256 tokens hardly an expert is left out. What
# stays small is the *work* per token; memory has to hold everything at any batch.

# %% [markdown]
# ## Exercise 1
#
# Released experts are stored in 4 bits a weight, and a scale of one byte for each 32 weights. How many bytes of
# *routed* experts does one generated token of `flash` read, all layers together?
#
# <details><summary>Hint</summary>
#
# Weights of one expert, visited experts, layers. Then bytes per weight, the scale included.
#
# </details>

# %%
expert_bytes = ...
check_expert_bytes(expert_bytes)

# %% [markdown]
# ## Exercise 2
#
# In another design an expert has *room* for a fixed number of visits in a batch; further visits are dropped. Write a
# function: from a list with each token's list of chosen experts, and the room of every expert, the number of dropped
# visits.
#
# <details><summary>Hint</summary>
#
# Count the visits of each expert. A token with two experts can lose none, one or both.
#
# </details>

# %%
dropped = ...  # such as: lambda chosen, room: 0
check_dropped(dropped)

# %% [markdown]
# ## Exercise 3
#
# Write one step of the balance rule for one layer, as a function: from the list of biases, the list of visits that each
# expert had, and the amount of a step, the list of new biases. An expert with exactly the mean keeps its bias.
#
# <details><summary>Hint</summary>
#
# The amount does not depend on how far an expert is from the mean.
#
# </details>

# %%
moved = ...  # such as: lambda bias, visits, rate: bias
check_moved(moved)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
def too_many(chosen, room):
    visits = [e for experts in chosen for e in experts]
    return sum(max(0, visits.count(e) - room) for e in set(visits))


def stepped(bias, loads, rate):
    mean = sum(loads) / len(loads)
    return [b + rate * ((load < mean) - (load > mean)) for b, load in zip(bias, loads, strict=True)]


check_expert_bytes(40 * 6 * one * 17 // 32)
check_dropped(too_many)
check_moved(stepped)
assert refuses(check_expert_bytes, routed.decode // 2) and refuses(check_dropped, lambda chosen, room: 0)
assert refuses(check_moved, lambda bias, loads, rate: stepped(bias, loads, -rate))

# %% [markdown]
# ## Recap
#
# - A token visits 6 of 384 routed experts and the shared one. They are chosen with a bias and weighed without it.
# - The rule moves a bias by a fixed amount against the load. Without it few experts did most of the work; the toy's
#   loss hardly told. Nor did it show that 16 experts beat two.
# - Balance decides how long processors wait for the busiest one.
# - The toy's experts follow the token, not the kind of text.

# %% [markdown]
# [Technical report](https://arxiv.org/abs/2609.19969): §4.2.2, for the balance. Before it: **lesson 00**, the tour.
# Next: **lesson 10**, Engram: facts that are looked up.

# %% [markdown]
# ## 中文小结
#
# 1. 骨干网络有 552B 参数，其中 98.6% 是路由专家；每个词元只用到 16.13B。
# 2. 选专家时加上偏置，算权重时不加；均衡规则每步只把偏置移动一个固定的小量。
# 3. 不用均衡规则，少数专家几乎包办一切；玩具模型的损失却几乎不变，也看不出十六个专家比两个好。
# 4. 均衡首先是为了硬件：一层的时间由最忙的专家决定。
# 5. 这里的专家按词元分工，而不是按文本种类；训练后让每个词元访问更多专家，损失反而上升。
