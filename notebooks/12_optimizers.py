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
# # Why should a matrix and a table not take the same kind of step?
#
# **Lesson 12, optimisers by role.** 35 minutes to read, about a minute to run on one CPU thread, no GPU. It builds on
# lesson 05 (the task) and lesson 09 (experts).
#
# Afterwards you can
# 1. orthogonalise a momentum by hand, and say for which weights that makes sense;
# 2. compare two optimisers without being fooled by their learning rates;
# 3. count the bytes that training keeps beside the weights.

# %%
import math

import torch
import torch.nn.functional as F

import tinyds41 as ds
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_12 import check_by_heads, check_cubic, check_saved_bytes, update_rms
from tinyds41.show.explore_orthogonal import explore_orthogonal, orthogonal_view
from tinyds41.show.optimizer_plots import plot_loss_by_rate, plot_ranked
from tinyds41.show.run_plots import plot_curves
from tinyds41.train.balanced_momentum import BalancedMomentum, balanced
from tinyds41.train.corpus import Corpus, documents
from tinyds41.train.muon import Muon
from tinyds41.train.optim import ByRole, adamw, learning_rate_at, set_learning_rate
from tinyds41.train.roles import parameter_roles
from tinyds41.train.tasks import Needle, needle_config

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run
_ = torch.manual_seed(0)

# %% [markdown]
# ## Feel the problem
#
# Picture an orchestra in which one trumpet drowns all others. If players change in proportion to what is heard, only
# the trumpet changes.
#
# A weight matrix is such an orchestra. Its *gradient* says how to change it, and is a sum of *directions*: each pairs
# a pattern of inputs with one of outputs, and has a loudness, its **singular value**.
#
# **Guess first:** the query matrix of a trained text toy has 64 directions. How many of them hold nine tenths of its
# gradient (of its squared numbers)?

# %% tags=["nbval-check-output"]
text = ds.example("text")
corpus = Corpus.from_texts(text.tokenizer, documents("plays", "held_out"))
ids = corpus.batch(0, 8, 64, 0).ids
F.cross_entropy(text(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
layer = text.layers[4]
for name in ("attn.wq_b", "attn.wo_b", "attn.wkv", "ffn.shared_experts.w1"):
    gradient = layer.get_parameter(f"{name}.weight").grad
    squares = torch.linalg.svdvals(gradient) ** 2
    part = squares.cumsum(0) / squares.sum()
    enough = int((part < 0.9).sum()) + 1
    print(f"{name:22}{len(squares):3} directions; the loudest holds {part[0]:.2f}; {enough:2} hold 0.9")
query = layer.attn.wq_b.weight.grad
values = torch.linalg.svdvals(query)
assert len(values) == 64 and values[0] > 500 * values[-1]

# %% [markdown]
# Very few; in the shared expert there are more. A step along such a gradient changes the matrix in a few directions and
# leaves the others nearly as they are.
#
# *AdamW*, the usual optimiser, gives every single number a step of its own size: it divides a mean of gradients by the
# root of a mean of their squares. It does not know that the numbers form a matrix. **Muon** does.

# %% [markdown]
# ## One picture and one equation
#
# Muon keeps the directions and makes all of them equally loud: it sets every singular value to 1.

# %%
ax = orthogonal_view(query, name="gradient of a query matrix")

# %% [markdown]
# Dashed: the 64 singular values of that gradient; the loudest is over 500 times the quietest. Blue: after
# Muon's iteration.
#
# No singular value is ever computed. **Newton-Schulz** needs matrix products alone. First $X = G / \lVert G \rVert$,
# with $G$ the matrix and $\lVert G \rVert$ the root of the sum of its squares; then, again and again,
#
# $$X \leftarrow a X + b\, X X^\top X + c\, X X^\top X X^\top X$$
#
# Such products keep directions. A singular value $s$ becomes $a s + b s^3 + c s^5$.

# %% [markdown]
# Eight *raising* steps have $(a, b, c) = (3.4445, -4.775, 2.0315)$: a small $s$ grows more than threefold in each.
# Two *settling* steps with $(2, -1.5, 0.5)$ then bring it to 1.
#
# What goes in is no bare gradient $g$ but a momentum $m \leftarrow 0.95\, m + 0.05\, g$, with a look ahead:
# $0.95\, m + 0.05\, g$.
#
# What comes out is scaled to a *root mean square* (RMS: the root of the mean of the squared numbers) of 0.18. Why 0.18,
# we shall see.

# %% [markdown]
# ## Naive version
#
# A query matrix holds several *heads*, one below the other. Each is a matrix that looks for something of its own, so
# each is orthogonalised **alone**. Experts are stacks of matrices: each alone, too.

# %%
def orthogonal(matrix, raising=8, settling=2):
    """The equation, step after step."""
    X = matrix / max(matrix.norm(), 1e-20)
    for a, b, c in [(3.4445, -4.775, 2.0315)] * raising + [(2, -1.5, 0.5)] * settling:
        gram = X @ X.T
        X = a * X + b * gram @ X + c * gram @ gram @ X
    return X


def direction(gradient, n_matrices=1, **steps):
    """Each head of a matrix, or each expert of a stack, alone; numbers with a root mean square of 1."""
    parts = gradient if gradient.ndim == 3 else gradient.chunk(n_matrices)
    done = [math.sqrt(max(part.shape)) * orthogonal(part, **steps) for part in parts]
    return (torch.stack if gradient.ndim == 3 else torch.cat)(done)


def muon_step(weight, gradient, momentum, rate, n_matrices):
    """Changes weight and momentum in place; weights shrink a little first."""
    momentum.mul_(0.95).add_(0.05 * gradient)
    ahead = 0.95 * momentum + 0.05 * gradient
    weight.mul_(1 - 0.1 * rate).sub_(rate * 0.18 * direction(ahead, n_matrices))

# %% [markdown]
# The factor: a matrix of $r \times k$ numbers ($r \le k$) whose $r$ singular values are all 1 has squares that add up
# to $r$. Their mean is $1/k$, so $\sqrt{k}$ makes the RMS 1. The library does the same, here over three steps with
# three heads:

# %%
weight, momentum = torch.randn(12, 5), torch.zeros(12, 5)
theirs = torch.nn.Parameter(weight.clone())
library = Muon([{"params": [theirs], "n_matrices": 3}], lr=0.01)
for _ in range(3):
    theirs.grad = torch.randn(12, 5)
    muon_step(weight, theirs.grad, momentum, 0.01, n_matrices=3)
    library.step()
print(f"largest difference after three steps {(weight - theirs).abs().max():.0e}")
assert torch.allclose(weight, theirs, atol=1e-5)  # float32 products in another order, ten times over

# %% [markdown]
# ## Who gets what
#
# Not every parameter is a matrix that maps inputs to outputs. This table has every trained number of `flash` exactly
# once. The model stands on the *meta* device: it has shapes and no numbers.

# %% tags=["nbval-check-output"]
flash = ds.Model(ds.Config.preset("flash"), device="meta")
roles = parameter_roles(flash)
print(roles)
names = [name for row in roles for name in row.names]
assert len(names) == len(set(names)) and set(names) == {name for name, _ in flash.named_parameters()}
assert sum(row.numbers for row in roles) == sum(p.numel() for p in flash.parameters())

# %% [markdown]
# *Tables* are token embedding, output head and Engram (lesson 10): a row per token or n-gram. They get *balanced
# momentum*, which comes below. Norms and scales are lists of single numbers with no directions: AdamW has
# them. Gate biases follow the experts' load and have no gradient (lesson 09). Engram's rows, seldom read, get five
# times the rate (`lr factor`).
#
# Heads have a role of their own only in query matrices. What stands under "matrix" is orthogonalised as it is stored.

# %% [markdown]
# ## A toy that must learn matrices
#
# The task of lesson 05, smaller: a row of 16 tokens hides four facts, a name and its value, and ends with four
# questions. One layer of attention suffices. Tables alone cannot answer, since names get new values in each row.
#
# Rows never come twice. So the loss of a step is a loss on rows that it has not seen.

# %% tags=["nbval-check-output"]
task = Needle(n_facts=4, n_keys=16, n_values=16, n_fillers=16)
toy = needle_config(task, num_hidden_layers=1, compress_ratios=(2,), kv_source_layer_ids=(0,),
                    index_source_layer_ids=(0,), candidate_source_layer_id=None)  # fmt: skip
print(f"{toy.num_attention_heads} heads, {toy.n_routed_experts} experts, {toy.vocab_size} words;"
      f" a blind guess {math.log(task.n_values):.2f} nats")
print(parameter_roles(ds.Model(toy)))

# %% [markdown]
# The loop takes any list of optimisers. The rate rises for five steps, then falls to a tenth. It returns the loss of
# the last five steps, and by step how far the query matrix moved: the RMS of its change, divided by the rate.

# %%
STEPS = 30


def teach(make, rate, seed=0):
    """A fresh toy, trained by the optimisers that `make(model, rate)` returns."""
    model = ds.Model(toy, seed=seed)
    parts, watched, losses, moves = make(model, rate), model.layers[0].attn.wq_b.weight, [], {}
    for step in range(STEPS):
        ids, _, wanted = task.batch(step, 32, 16, seed)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), wanted.flatten())
        model.zero_grad()
        loss.backward()
        before, now = watched.detach().clone(), learning_rate_at(step, base=rate, warmup=5, steps=STEPS)
        for part in parts:
            set_learning_rate(part, now)
            part.step()
        losses.append(loss.item())
        moves[step] = (watched.detach() - before).square().mean().sqrt().item() / now
    return sum(losses[-5:]) / 5, moves

# %%
def adamw_alone(model, rate):
    return [adamw(model, rate)]


def report(model, rate):
    """Three optimisers: Muon, balanced momentum, AdamW."""
    return ByRole(model, rate).parts

# %% [markdown]
# ## Guess before running
#
# The report gives AdamW and the two others *one* learning rate. So let us be fair: the same rate for both, the same
# toy, the same rows. At a rate of 0.005, who is ahead after 30 steps?

# %%
rates = (0.005, 0.01, 0.02, 0.04)
runs = {name: {rate: teach(make, rate) for rate in rates}
        for name, make in (("AdamW", adamw_alone), ("the report's", report))}  # fmt: skip
by_rate = {name: {rate: run[0] for rate, run in found.items()} for name, found in runs.items()}
adam, ours = by_rate.values()
for rate in rates:
    print(f"rate {rate:5}: AdamW {adam[rate]:.2f}, the report's {ours[rate]:.2f}")
assert adam[0.005] < ours[0.005] - 0.3 and ours[0.04] < 0.2 < min(adam.values()) - 0.1

# %%
ax = plot_loss_by_rate(by_rate, model=f"the toy, {STEPS} steps")

# %% [markdown]
# **The surprise.** At low rates AdamW is far ahead. Whoever compares at one rate of 0.005 or 0.01 throws the report's
# optimisers away. They go on where AdamW turns: at 0.04 they have solved the task, and AdamW has not at any rate.
# (Their curve still falls at the edge; we stop here.)
#
# So "the same rate" was not fair. Each has to be judged at *its own* best. Is that luck of one seed? Another one:

# %%
again = {"AdamW": teach(adamw_alone, 0.02, seed=1)[0], "the report's": teach(report, 0.04, seed=1)[0]}
for name, loss in again.items():
    print(f"{name:13} best {min(by_rate[name].values()):.2f}, seed 1 {loss:.2f}")
assert again["the report's"] < 0.2 < again["AdamW"]

# %% [markdown]
# What the plot does not show: who wins in the long run. Thirty steps reward whoever starts fast.
#
# ## Why the two rates differ
#
# How far does the query matrix move per step, in units of the rate?

# %%
moves = {"AdamW": runs["AdamW"][0.02][1], "Muon": runs["the report's"][0.02][1]}
ax = plot_curves(moves, xlabel="step", ylabel="RMS of a step, in rates", model="query matrix of the toy",
                 baseline=(0.18, "0.18"))  # fmt: skip
for name, move in moves.items():
    print(f"{name:6} first step {move[0]:.2f}, last {move[STEPS - 1]:.2f}")
print(f"0.18 with 16 directions of 32: {0.18 * math.sqrt(16 / 32):.2f}")
assert moves["AdamW"][0] > 0.9 and min(moves["AdamW"].values()) < 0.4
assert all(abs(moves["Muon"][step] - 0.18) < 0.01 for step in range(2, STEPS))

# %% [markdown]
# AdamW's first step moves every number by the full rate. Then gradients contradict each other, and their mean shrinks.
# Muon moves by 0.18 nearly from the start. (Its first step is shorter: only the 16 names ask, so the gradient has 16
# directions of 32. The others are 0 and stay 0.)
#
# The report wants both to share a rate: 0.18 is meant to be the size that AdamW's steps come to. In our 30 steps they
# are longer: at one rate, AdamW walks farther.

# %% [markdown]
# ## Which of them earns it?
#
# The report's set has two new optimisers. We give AdamW one half back.
#
# **Guess first:** which loses more, AdamW on the matrices or AdamW on the tables? (Each at the best rate that we know
# for its matrices.)

# %%
def only(kind):
    """One of the report's optimisers stays, AdamW has all the rest."""
    def make(model, rate):
        return [part if isinstance(part, kind)
                else torch.optim.AdamW(part.param_groups, betas=(0.9, 0.95), eps=1e-20)
                for part in ByRole(model, rate).parts]  # fmt: skip

    return make

# %%
halves = {"both": ours[0.04], "Muon, tables by AdamW": teach(only(Muon), 0.04)[0],
          "balanced tables, matrices by AdamW": teach(only(BalancedMomentum), 0.02)[0],
          "neither": adam[0.02]}  # fmt: skip
print("\n".join(f"{name:35}{loss:.2f}" for name, loss in halves.items()))
assert halves["Muon, tables by AdamW"] < 0.2 < halves["balanced tables, matrices by AdamW"]

# %% [markdown]
# Muon earns all of it here. **A miss:** balanced momentum brings nothing that this toy could show. All but four of its
# 52 rows are read in every step; the tables of `flash` have rows that wait long. We come back to them.

# %% [markdown]
# ## Turn the knob
#
# Ten iterations for every matrix and step are much work. How exact must they be? The picture with fewer: one raising
# step and both settling ones. (In a live notebook the cell behind it has sliders.)

# %%
ax = orthogonal_view(query, raising=1, name="gradient of a query matrix")

# %%
# NBVAL_IGNORE_OUTPUT
explore_orthogonal(query, name="gradient of a query matrix")

# %% [markdown]
# After three steps the singular values are anything but equal. **Guess first:** what is the loss then, where ten steps
# give a solved task? And with the two settling ones alone? And with none, the momentum as it is, only scaled?

# %%
def with_steps(**steps):
    """The report's set with a direction of our own, the naive one above."""
    def make(model, rate):
        parts = ByRole(model, rate).parts
        parts[0].direction = lambda gradient, group: direction(gradient, group["n_matrices"], **steps)
        return parts

    return make

# %%
by_steps = {(8, 2): ours[0.04]}
for raising, settling in ((1, 2), (0, 2), (0, 0)):
    by_steps[raising, settling] = teach(with_steps(raising=raising, settling=settling), 0.04)[0]
for (raising, settling), loss in by_steps.items():
    print(f"{raising} raising and {settling} settling steps: loss {loss:.2f}")
assert by_steps[1, 2] < 0.2 < 0.8 < by_steps[0, 0]

# %% [markdown]
# Three steps do what ten do: it matters that quiet directions are lifted, not that all become exactly 1. In this toy;
# why the report takes ten, thirty steps of a toy cannot say.
#
# ## Take it away
#
# "None" above was not quite fair: without the iteration the numbers are smaller than 0.18. So now with the same RMS of
# 0.18 for each head and expert, and at two rates.

# %%
def same_size(gradient, group):
    """No orthogonalisation: the momentum itself, with a root mean square of 1 in each matrix."""
    parts = gradient if gradient.ndim == 3 else gradient.chunk(group["n_matrices"])
    done = [part / part.square().mean().sqrt().clamp(min=1e-20) for part in parts]
    return (torch.stack if gradient.ndim == 3 else torch.cat)(done)


def plain(model, rate):
    parts = ByRole(model, rate).parts
    parts[0].direction = same_size
    return parts

# %%
without = {rate: teach(plain, rate)[0] for rate in (0.02, 0.04)}
print("without orthogonalisation:", {rate: round(loss, 2) for rate, loss in without.items()})
assert min(without.values()) > min(adam.values()) + 0.2 and ours[0.04] < 0.2

# %% [markdown]
# **It hurts.** Both are far behind AdamW at its best, though each step is as long as Muon's. The direction makes the
# difference, not the length.
#
# ## Heads and experts: each alone
#
# Why not orthogonalise all heads, or all experts, as one tall matrix? Back to the gradients of the text toy. Here is
# the RMS of the update of each part.

# %%
def in_one(gradient):
    """Heads or experts orthogonalised together."""
    rows = gradient.flatten(0, -2)
    return direction(rows).view_as(gradient)


experts = layer.ffn.experts.w1.grad
for name, gradient in (("heads", query), ("experts", experts)):
    print(f"{name:8} alone   ", update_rms(direction(gradient, 4), 4))
    print(f"{'':8} together", update_rms(in_one(gradient), 4))
spread = update_rms(in_one(experts), 4)
assert max(spread) > 1.5 * min(spread)

# %% [markdown]
# Alone, each moves by 0.18. Together, the experts share what there is: one moves less than half as far as another.
# The heads of this model are about equally loud.
#
# Now an extreme case: in our small toy the gradient of the first head is made 1,024 times as loud, for the whole
# training.
#
# **Guess first:** how far does the second head then move, and what does that do to the loss?

# %%
def loud(gradient, role):
    """The first of two heads shouts; a momentum of loud gradients is a loud momentum."""
    return torch.cat([1024 * gradient[:32], gradient[32:]]) if role == "heads" else gradient


def shouting(model, rate):
    parts = ByRole(model, rate).parts
    parts[0].direction = lambda gradient, group: in_one(loud(gradient, group["role"]))
    return parts

# %%
example = torch.randn(64, 32)
alone, quiet = direction(loud(example, "heads"), 2), direction(example, 2)
print("alone", update_rms(alone, 2), "together", update_rms(in_one(loud(example, "heads")), 2))
assert torch.equal(alone, quiet)  # 1,024 is a power of two: alone, not one bit tells that a head shouts
drowned = teach(shouting, 0.04)[0]
print(f"loss: each head alone {ours[0.04]:.3f}; together, and one shouts, {drowned:.3f}")
assert update_rms(in_one(loud(example, "heads")), 2)[1] < 0.03

# %% [markdown]
# **A miss.** Together, the loud head takes the update and the other stands nearly still. That is what the rule is
# against, and alone it cannot happen. Yet the loss hardly tells; perhaps one head is enough for this task. That each
# head alone learns *better* we could not show.

# %% [markdown]
# ## Tables: rows that are seldom read
#
# The output head of the text toy has a row per token. Tokens of the batch get long gradients, all others short ones.
# **Balanced momentum** brings rows to length 1, then columns, then rows, eleven times in all, as Sinkhorn did with
# mixing matrices in lesson 08. Rows of at most a thousandth of the mean length count as not read and become 0.

# %%
def balance(table):
    """Odd times rows, even times columns."""
    length = table.norm(dim=1)
    U = table * (length > 1e-3 * length.mean())[:, None]
    for k in range(1, 12):
        U = U / U.norm(dim=k % 2, keepdim=True).clamp(min=1e-20)
    return U

# %%
table = text.get_parameter("head.weight").grad
mine = balance(table)
assert torch.allclose(mine, balanced(table), atol=1e-6)  # float32: a dozen divisions
lengths = {"gradient": table.norm(dim=1) / table.norm(dim=1).mean(), "balanced": mine.norm(dim=1)}
ax = plot_ranked({name: values.tolist() for name, values in lengths.items()}, what="rows of the output head",
                 ylabel="length, in means", model="the text toy")  # fmt: skip
columns = [matrix.norm(dim=0) for matrix in (table, mine)]
said = torch.zeros(len(table), dtype=torch.bool).index_fill(0, ids[:, 1:].unique(), True)
ratio = (lengths["gradient"][said].mean() / lengths["gradient"][~said].mean()).item()
print(f"rows of tokens in the batch are {ratio:.0f} times as long as the others; balanced, all are alike")
print("longest column to shortest: before {:.2f}, after {:.2f}".format(*(c.max() / c.min() for c in columns)))
assert ratio > 3 and (lengths["balanced"] - 1).abs().max() < 1e-3

# %% [markdown]
# Every row moves equally far, however rare its token. Is that what we want?
#
# **Guess first:** a table of 64 rows. All have made-up gradients in every step, but row 0 has one only in the very
# first. For how many steps does it go on moving?

# %%
def followed(make, steps=140):
    """By step, how far row 0 moves, relative to the mean of the other rows."""
    table, found, generator = torch.nn.Parameter(torch.zeros(64, 16)), {}, torch.Generator().manual_seed(0)
    optimizer = make([table])
    for step in range(steps):
        table.grad, before = torch.randn(64, 16, generator=generator), table.detach().clone()
        table.grad[0] *= step == 0
        optimizer.step()
        length = (table.detach() - before).norm(dim=1)
        found[step] = (length[0] / length[1:].mean()).item()
    return found

# %%
once = {"AdamW": followed(lambda rows: torch.optim.AdamW(rows, lr=1.0, betas=(0.9, 0.95), weight_decay=0)),
        "balanced": followed(lambda rows: BalancedMomentum(rows, lr=1.0))}  # fmt: skip
ax = plot_curves(once, xlabel="step", ylabel="move of row 0, in moves of others", model="a row that was read once")
print({name: f"{sum(move > 0.5 for move in curve.values())} steps" for name, curve in once.items()},
      "of more than half a move; added up", {name: round(sum(curve.values()), 1) for name, curve in once.items()})
assert sum(once["balanced"].values()) > 3 * sum(once["AdamW"].values())

# %% [markdown]
# About a hundred steps at *full* length, in the direction of a single reading. The momentum shrinks, but balancing
# lifts it to length 1 until it falls below a thousandth of the mean. AdamW lets it fade. (How many steps it is
# depends on the gradients of the others.)
#
# This follows from the rule as the report gives it; whether it harms a model with millions of seldom-read rows, our
# toys do not say.

# %% [markdown]
# ## What it costs
#
# Nothing of this is left when a model answers: no byte of cache, nothing in the pool, no FLOP in decoding. Training
# pays. First the bytes: AdamW keeps two numbers per weight (means of gradients and of squares), Muon and balanced
# momentum one. Measured in the toy, from the optimisers' own state:

# %%
def state_bytes(make):
    """What the optimisers keep after one step, per weight they move."""
    model = ds.Model(toy)
    parts = make(model, 1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for part in parts:
        part.step()
    kept = {id(value): value.nbytes for part in parts for state in part.state.values() for value in state.values()}
    moved = [p for part in parts for group in part.param_groups for p in group["params"]]
    return sum(kept.values()) / sum(p.numel() for p in moved)

# %% tags=["nbval-check-output"]
per_weight = {name: state_bytes(make) for name, make in (("AdamW", adamw_alone), ("the report's", report))}
total = sum(row.numbers for row in roles if row.optimizer != "load")
one_moment = sum(row.numbers for row in roles if row.optimizer in ("Muon", "balanced momentum"))
print({name: round(value, 2) for name, value in per_weight.items()}, "bytes per weight of the toy")
print(f"flash, float32: AdamW {8 * total / 1e12:.2f} TB, the report's {(8 * total - 4 * one_moment) / 1e12:.2f} TB,"
      f" for {total / 1e9:.1f}B weights")  # fmt: skip
assert 7.9 < per_weight["AdamW"] < 8.1 and 4 < per_weight["the report's"] < 4.1

# %% [markdown]
# Half. (Moments in float32 are our assumption.) Then the work. One step of the iteration on an $n \times k$ matrix is
# three products, $4 n^2 k + 2 n^3$ FLOPs. A token's way through the same matrix, forward and back again, takes 6 FLOPs
# per weight. So how many tokens' ways are ten steps?

# %%
def worth(n, k):
    """Tokens whose passes through an n x k matrix cost as much as orthogonalising it (n the smaller side)."""
    return 10 * (4 * n * n * k + 2 * n**3) / (6 * n * k)

# %% tags=["nbval-check-output"]
config = flash.config
tokens = worth(config.moe_intermediate_size, config.hidden_size)
batch = tokens * config.n_routed_experts / config.num_experts_per_tok
print(f"an expert of flash: {tokens:,.0f} tokens; if they choose evenly, a batch of {batch:,.0f}")
print(f"an expert of the toy: {worth(toy.moe_intermediate_size, toy.hidden_size):,.0f} tokens,"
      f" a batch gives it {32 * 16 * toy.num_experts_per_tok // toy.n_routed_experts}")
assert 1e4 < tokens < 1e5

# %% [markdown]
# The work does not depend on the batch: where a step reads many millions of tokens it is small change, in a toy it is
# as large as the rest. AdamW's is a few FLOPs per weight in both.
#
# ## What a toy cannot show
#
# Thirty steps and one made-up task. Nothing here says which optimiser is better after a trillion tokens, whether heads
# alone or balanced tables help there, or which rate `flash` wants. What holds at any size: the table of roles, the
# algebra, the bytes.

# %% [markdown]
# ## Exercise 1
#
# How many bytes of moments (float32) does `flash` save against AdamW in its *tables*, Engram's among them?
#
# <details><summary>Hint</summary>
#
# Two rows of the big table above. Balanced momentum keeps one number per weight where AdamW keeps two.
#
# </details>

# %%
saved_bytes = ...
check_saved_bytes(saved_bytes)

# %% [markdown]
# ## Exercise 2
#
# Write Muon's first update of a query matrix at a rate of 1: from a gradient (rows, columns) and the number of heads,
# what is subtracted. The heads lie one below the other, and each has a root mean square of 0.18. `orthogonal` is yours
# to use.
#
# <details><summary>Hint</summary>
#
# The factor depends on the shape of a head, not on that of the whole matrix.
#
# </details>

# %%
first_update = ...  # such as: lambda gradient, n_heads: gradient
check_by_heads(first_update)

# %% [markdown]
# ## Exercise 3
#
# A cheaper iteration has no fifth power: $s \leftarrow a s + b s^3$. Find $a$ and $b$ such that 1 stays 1, and that the
# slope there is 0, so that what is near 1 gets there at once. Answer with the pair `(a, b)`.
#
# <details><summary>Hint</summary>
#
# Two conditions, two unknowns: the value at 1, and the derivative at 1.
#
# </details>

# %%
pair = ...
check_cubic(pair)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
def by_heads(gradient, n_heads):
    return 0.18 * direction(gradient, n_heads)


in_tables = sum(row.numbers for row in roles if row.alone == "table")
check_saved_bytes(4 * in_tables)
check_by_heads(by_heads)
check_cubic((1.5, -0.5))
assert refuses(check_saved_bytes, 8 * in_tables) and refuses(check_cubic, (2, -1))
assert refuses(check_by_heads, lambda gradient, n_heads: 0.18 * direction(gradient))

# %% [markdown]
# ## Recap
#
# - Muon makes all directions of a matrix equally loud, by ten steps of products; heads and experts each alone.
# - At equal rates AdamW was ahead where rates were low, far behind at its rival's best. Compare each at its own best.
# - The toy needed directions: with steps of the same length, not orthogonalised, most was lost. It did not need
#   exactness, balanced tables, or heads alone.
# - One moment instead of two halves what training keeps.

# %% [markdown]
# [Technical report](https://arxiv.org/abs/2609.19969): §2.5, §4.2.2. Before it: **lesson 11**, drafts that are judged.
# Next: **lesson 13**, the flat decode curve.

# %% [markdown]
# ## 中文小结
#
# 1. Muon 用十步矩阵乘法让动量矩阵的所有方向一样响；每个头、每个专家各自单独做。
# 2. 同一学习率下：低学习率时 AdamW 领先，高学习率时报告的优化器解决了任务；应各取最佳学习率再比。
# 3. 步长相同但不做正交化，比 AdamW 还差；三步与十步却一样好。
# 4. 行列均衡动量让稀有行与常见行走得一样远；只读过一次的行会继续走上百步。
# 5. 每个权重只存一个动量，优化器的内存比 AdamW 少一半；推理时不花任何代价。
