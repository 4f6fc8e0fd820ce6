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
# # Must a fact be learned by heart, or can it be looked up?
#
# **Lesson 10, Engram: facts in, facts out.** 30 minutes to read, about a minute to run on one CPU thread, no GPU.
#
# Afterwards you can
# 1. compute by hand which rows of a table a token reads, and how far a gate opens to them;
# 2. show by taking parts away what a trained model needs for which facts;
# 3. say what a much too small table does, and what a large one costs.

# %%
import copy
import math
import re
import tempfile
import unicodedata

import torch

import tinyds41 as ds
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.parameters import count_parameters
from tinyds41.cost.traffic import DecodeTraffic
from tinyds41.course.exercises import refuses
from tinyds41.course.lesson_10 import check_bytes, check_opening, check_shared
from tinyds41.formats import ENGRAM
from tinyds41.infer import engram_host, host_layout, host_table, host_writer
from tinyds41.model.engram import multipliers, table_primes
from tinyds41.show.accuracy_plot import Curve, plot_accuracy
from tinyds41.show.cost_plots import plot_parameters
from tinyds41.show.explore_hash import explore_hash, hash_view
from tinyds41.show.gate_plot import plot_engram_gates
from tinyds41.show.stream_observations import token_gates
from tinyds41.train.examples import example_record
from tinyds41.train.fact_task import Facts, Quiz, facts_config, recall
from tinyds41.train.tasks import share

torch.set_num_threads(1)  # more would add in another order: not the same bits on every run
_ = torch.manual_seed(0)

# %% [markdown]
# ## Feel the problem
#
# A lawyer thinks; an assistant fetches the file. The lawyer need not know the file by heart, only whether it is of use.
#
# In a language model facts usually sit in the weights that also think. Engram puts some into tables instead: by the
# last two, three and four tokens, its *n-grams*, a token looks up a few *rows*, each a list of numbers.

# %% [markdown]
# **Guess first:** how many numbers do all tables of the released model hold? How many has it besides? And how many
# bytes of the tables does one token read?

# %% tags=["nbval-check-output"]
flash = ds.Config.preset("flash")
counted = count_parameters(flash)
n_rows = sum(flash.engram_num_embeddings)
row = ENGRAM.row_bytes(flash.engram_head_dim)  # 8-bit numbers, and a scale for each 32 of them
orders, read_here = flash.engram_max_ngram_size - 1, (flash.engram_max_ngram_size - 1) * flash.engram_n_heads
read = len(flash.engram_layer_ids) * read_here
print(f"tables {counted.engram_rows / 1e9:.1f}B numbers, in front of layers {flash.engram_layer_ids};"
      f" the rest of the model, its backbone, {counted.backbone / 1e9:.1f}B")
print(f"a token reads {flash.engram_n_heads} rows for each of {orders} orders, {read_here} from each table")
print(f"{n_rows:,} rows of {row} bytes: {n_rows * row / 1e9:.1f} GB; a token reads {read} rows: {read * row:,} bytes")
assert (row, read, read * row) == (264, 48, 12_672) and 196.6 == round(counted.engram_rows / 1e9, 1) > 168

# %%
ax = plot_parameters(counted, model="flash")

# %% [markdown]
# A bar is what is stored, an orange mark what one generated token is multiplied with. Engram's rows have no mark: rows
# are read, no token is multiplied with them. What takes work are Engram's small *projections*: they turn the rows that
# were read into something that layers can use.
#
# > **Correction.** Popular accounts give Engram 168 billion parameters. Its rows hold 196.6 billion numbers.

# %% [markdown]
# ## One equation for the address
#
# How does an n-gram find its row? Tokens are numbers. Let $c_0$ be that of the token, $c_1$ that of the one before it,
# and so on; $a_i$ are fixed odd multipliers. For an n-gram of *order* $n$, so of $n$ tokens,
#
# $$x_n = c_0 a_0 \oplus c_1 a_1 \oplus \dots \oplus c_{n-1} a_{n-1}, \qquad \text{row} = x_n \bmod p$$
#
# where $\oplus$ is the bitwise exclusive or, and $p$ a prime. Such a scrambling is called a *hash*.

# %% [markdown]
# The rows of a table are numbered through and cut into *columns*: stretches of $p$ rows. Each order has several of
# them, one for each of its *heads*, and each column has a prime of its own. An n-gram reads one row of each of these
# columns, counted from the column's start. So two n-grams that meet in one column rarely meet in the next one.

# %% [markdown]
# ## And one for the gate
#
# Inside the model a token has four states in parallel, its *streams* $X_i$ (lesson 08). The rows that it reads are
# joined and projected to a *key* $k_i$ for each stream and to one *value* $v$.
#
# $$t_i = \frac{1}{\sqrt{D}} \sum_d \hat X_{i,d}\, w_{i,d}\, \hat k_{i,d}, \qquad
# g_i = \sigma\!\left(\text{sgn}(t_i)\sqrt{|t_i|}\right), \qquad X_i \leftarrow X_i + g_i v$$

# %% [markdown]
# A hat means: divided by its root mean square. $D$ is the width of a stream, $d$ counts its channels, $w$ is learned,
# $\sigma$ the sigmoid. The *gate* $g_i$ opens where stream and key agree. Where $t_i$ is 0, it stands half open.

# %% [markdown]
# ## Naive version: first the tokens
#
# "The" and " THE" mean the same to a table of facts. So before hashing, tokens that differ only in case, accents or
# blanks at their ends get one number, the *compressed id*. That is the $c_i$ of the equation.

# %% tags=["nbval-check-output"]
def label(text):
    """What remains of a token's text; tokens with equal labels share a compressed id."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(letter for letter in text if unicodedata.category(letter) != "Mn").lower()
    short = re.sub(r"[ \t\r\n]+", " ", text)
    return short if short == " " else short.strip() or text


tokenizer = ds.example("text").tokenizer
texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
whole = [token for token, text in enumerate(texts) if "\ufffd" not in text]  # the others are parts of a character
found, wanted = {}, tokenizer.compressed_map().tolist()
for token in whole:
    found.setdefault(label(texts[token]), set()).add(wanted[token])
print(f"{tokenizer.vocab_size:,} tokens of our tokenizer, {tokenizer.compressed_vocab_size:,} compressed ids;",
      [text for token, text in enumerate(texts) if wanted[token] == wanted[texts.index("The")]], "share one")
assert all(len(ids) == 1 for ids in found.values()) and len(found) == len({wanted[token] for token in whole})

# %% [markdown]
# ## Naive version: addresses and gates
#
# Plain Python, one token at a time. Before the start of a text look-back sees *pads*, tokens that mean nothing. Where
# it meets a pad in the text, it sees only pads from there on.

# %%
def addresses(ids, place, multipliers, primes, heads, pad):
    """The rows that the token at a place reads: for each order from 2 on, one in each head's column."""
    mixed, ended, rows = 0, False, []
    for back, multiplier in enumerate(multipliers):
        ended = ended or place < back or ids[place - back] == pad
        mixed ^= (pad if ended else ids[place - back]) * multiplier
        if back > 0:
            for prime in primes[(back - 1) * heads : back * heads]:
                rows.append(sum(primes[: len(rows)]) + mixed % prime)  # columns lie one behind the other
    return rows


def gate(stream, key, weight):
    """How far one stream opens to what was read."""
    hat_stream, hat_key = (x / x.square().mean().sqrt() for x in (stream, key))
    t = float((hat_stream * weight * hat_key).sum()) / math.sqrt(len(stream))
    root = math.sqrt(max(abs(t), 1e-6)) * (-1 if t < 0 else 1)
    return 1 / (1 + math.exp(-root))

# %% [markdown]
# Does the library do the same? We take an untrained toy with a table in front of layer 1. Its tokens are those of a
# task that comes below; each is its own compressed id. Of the table the naive version gets the packed bytes alone. The
# text has a pad (token 2) in it.

# %%
task = Facts(n_names=512, n_mentions=6, n_facts=2)
config = facts_config(task, rows=256)
toy = ds.Model(config, seed=0)
engram, heads, pad = toy.layers[1].engram, config.engram_n_heads, config.engram_pad_token_id
ids = [*task.batch(step=0, batch_size=1, length=40).ids[0, :20].tolist(), pad, 52, 53, 54]

# %%
factors, primes = engram.multipliers.tolist(), engram.primes.tolist()
mine = [addresses(ids, place, factors, primes, heads, pad) for place in range(len(ids))]
packed = ENGRAM.encode(engram.embed.weight.detach())  # bytes, as ordinary memory or a file keeps them
fetched = ENGRAM.decode(packed[torch.tensor(mine)], config.engram_head_dim).flatten(1)  # before any layer has run
print(f"{len(packed):,} rows of {packed.shape[1]} bytes, primes {primes}; the last token reads rows {mine[-1]}")

# %%
trace = ds.Trace("layers.1.streams", "layers.1.engram.*")
with torch.no_grad():
    toy(torch.tensor([ids]), trace=trace)
    keys = engram.wkv(fetched)[:, : -config.hidden_size].unflatten(-1, (config.hc_mult, config.hidden_size))
assert trace["layers.1.engram.rows"][0].tolist() == mine

# %%
theirs = trace["layers.1.engram.gate"][0]
with torch.no_grad():
    streams = trace["layers.1.streams"][0]  # behind Engram; the untrained value is zero, so before it as well
    weight = engram.q_weight * engram.k_weight
    naive = torch.tensor([[gate(streams[place, i], keys[place, i], weight[i]) for i in range(config.hc_mult)]
                          for place in range(len(ids))])
naive[ids.index(pad)] = 0  # a pad takes nothing
print(f"gates {naive[naive > 0].min():.3f} to {naive.max():.3f}, largest difference {(naive - theirs).abs().max():.1e}")
assert torch.allclose(naive, theirs, atol=1e-5)  # float32 sums of 64 products, in another order

# %% [markdown]
# Equal. Notice what an address needs: token ids, nothing that a layer computes. So rows can be on their way before the
# first layer has started.
#
# Which rows does token 54 read behind 36, 52, 53? And which other n-grams of a long text read one of them too?
# (`seen` counts how often an n-gram stands in the tokens that are compared.)

# %%
print(hash_view(toy, [36, 52, 53, 54], among=task.batch(step=1, batch_size=1, length=120).ids[0].tolist()))

# %% [markdown]
# Numbers with bars between them are an n-gram, oldest token first. Some share a row: they *collide*. None here shares
# both rows of an order. In a live notebook the next cell lets you type other tokens.

# %%
# NBVAL_IGNORE_OUTPUT
explore_hash(toy, "36 52 53 54", among=task.batch(step=1, batch_size=1, length=120).ids[0].tolist())

# %% [markdown]
# ## A task with two kinds of facts
#
# **Names.** 512 names of three letters, each with one of 16 values. The book of names is the same for every text, and
# no text tells a value: it has to be known. The last two letters alone do not suffice; most pairs end several names.
#
# **Needles.** A key with its value stands in the text, with another value in each text, and at the end the key is asked
# for. Nothing can know the value beforehand: it has to be found.

# %% tags=["nbval-check-output"]
words = ["-"] * 4 + [f"K{i}" for i in range(16)] + [f"v{i}" for i in range(16)] + ["."] * 16 + list("ABCDEFGHIJ")
ids, _, wanted = task.batch(step=0, batch_size=1, length=task.shortest)
print(" ".join(words[token] for token in ids[0, :-1]))
print(" ".join(words[answer] if answer >= 0 else "·" for answer in wanted[0]))
names, values = task.book
guesses = {}
for (_, *pair), value in zip(names.tolist(), values.tolist(), strict=True):
    guesses.setdefault(tuple(pair), []).append(value)
best = sum(max(map(of.count, of)) for of in guesses.values()) / len(names)
print(f"{len(names)} names; right by blind guess {1 / task.n_values:.4f}, by the best from two letters {best:.3f}")
assert len(names) == 512 and best < 0.5

# %% [markdown]
# The first line is the text: letters A to J, keys K, values v, fillers as dots. The second shows where which value is
# wanted.
#
# ## Train a tiny one, then give it a table
#
# Three layers: two with sliding windows of eight tokens, and one that also fetches *entries* from the whole text
# (lesson 05). It begins *without* a table, on needles alone. This part was trained before, by the command printed
# below, and comes with the package; the rest is trained here.

# %%
bare, record = ds.example("facts"), example_record("facts")
common = {"seed": 0, "learning_rate": 4e-3, "batch_size": 32}
start = recall(bare, task)
print(f"{record['command']}\n{record['steps']} steps of {record['tokens'] // record['steps']} tokens")
print(f"right: names {share(start.names):.3f}, needles {share(start.needles):.3f}")
assert bare.config == facts_config(task, rows=256, engram_layer_ids=())
assert share(start.names) < 0.15 and share(start.needles) > 0.2

# %% [markdown]
# Now two copies with the same weights. One gets a table in front of layer 1. What it reads from it, the value $v$,
# starts at zero, so both answer alike at first. Then both see the same mixed texts, for equally many steps.
#
# **Guess first:** how much of the book does each of them know after 80 steps, in which a name comes up 30 times on
# average? And what becomes of the needles?

# %%
model = ds.Model(config, seed=0)
left_out = model.load_state_dict(bare.state_dict(), strict=False).missing_keys
assert all(".engram." in name for name in left_out)
quizzes = {"table": Quiz(task, model), "no table": Quiz(task, bare)}
for quiz in quizzes.values():
    ds.train(quiz.model, quiz, steps=80, length=task.shortest, **common)
    quiz.found[80] = recall(quiz.model, task)
assert torch.equal(*(quiz.found[0].names for quiz in quizzes.values()))  # alike before the first step
print(f"a name came up {80 * 32 * task.n_mentions / task.n_names:.0f} times; numbers in each toy:",
      {name: f"{sum(p.numel() for p in quiz.model.parameters()):,}" for name, quiz in quizzes.items()})

# %%
curves = []
for look, (name, quiz) in enumerate(quizzes.items()):
    for kind, what in enumerate(("names", "needles")):
        shares = {step: share(getattr(found, what)) for step, found in quiz.found.items()}
        curves.append(Curve(f"{what}, {name}", shares, kind, look))
        print(f"{what:8}{name:9}", " ".join(f"{right:.3f}" for right in shares.values()))
ax = plot_accuracy(curves, setting="training steps on mixed texts", model="two toys", baselines={"blind guess": 1 / 16})
known, unaided = quizzes["table"].found[80], quizzes["no table"].found[80]
assert share(known.names) > 0.85 and share(known.names) > share(unaided.names) + 0.3
assert min(share(known.needles), share(unaided.needles)) > 0.9

# %% [markdown]
# With a table nearly the whole book is learned in these steps, without one much less of it. The toy without can
# learn by heart too: its curve rises, slowly. Where it would end is not shown here. And it has fewer numbers to learn
# with.
#
# And the needles? Both find them equally well. Here a table does not make the finding better. It does not disturb it
# either.

# %% [markdown]
# ## Take the table away
#
# We change the toy that was trained with a table, in three ways. Engram is switched off. Or the rows of the table are
# shuffled. Or the other way round: the table stays, but layer 2 loses the entries that it fetches from the text, and
# keeps its window alone.
#
# **Guess first:** for each of the three, which share of names is still right, and which share of needles?

# %%
off = {"engram_layer_ids": (), "engram_num_embeddings": ()}
blind = {"compress_ratios": (0, 0, 0), "kv_source_layer_ids": (), "index_source_layer_ids": ()}
mixed_up = copy.deepcopy(model)
rows = mixed_up.layers[1].engram.embed.weight.data
_ = rows.copy_(rows[torch.randperm(len(rows))])

# %%
found = {"as trained": known, "no table": recall(ds.variant(model, **off), task),
         "rows shuffled": recall(mixed_up, task), "no entries": recall(ds.variant(model, **blind), task)}
for name, one in found.items():
    print(f"{name:14} names {share(one.names):.3f}   needles {share(one.needles):.3f}")
assert share(found["no table"].names) < share(unaided.names)
assert share(found["no table"].names) < 0.3 < 0.9 < share(found["no table"].needles)
assert share(found["no entries"].needles) < 0.3 < 0.8 < share(found["no entries"].names)

# %% [markdown]
# **It hurts, and only where it should.** Without the table names are gone and needles stay; without entries it is the
# other way round. Rows in the wrong order are no better than none.
#
# The toy that never had a table (above, at the end of its curve) knows more names than this one without its table.
# Either the layers left names to the table, or they cannot do without its input. We did not test which.

# %% [markdown]
# > **Measured.** Popular accounts say that Engram frees the model to reason. Here, without it, facts fall and finding
# stays. Whether thinking gets better with it, this task cannot tell.

# %% [markdown]
# ## Which n-grams hold the names?
#
# A token reads by the last two, three and four tokens. At the last letter of a name the last four are the name and
# whatever token stands before it.
#
# **Guess first:** in the trained toy we silence the columns of one order at a time. Which loss costs most? Does the
# longest n-gram know most?

# %%
size = config.engram_head_dim * heads  # numbers that one order reads
for order in (2, 3, 4):
    without = copy.deepcopy(model)
    without.layers[1].engram.wkv.weight.data[:, (order - 2) * size : (order - 1) * size] = 0
    found[order] = recall(without, task)
    print(f"without order {order}: names {share(found[order].names):.3f}")
assert share(found[3].names) < share(found[2].names) < share(found[4].names) and share(found[4].names) > 0.8

# %%
seen = torch.cat([task.batch(step, 32, task.shortest).ids[:, :-1] for step in range(80)])  # all that it was taught
grams = seen.unfold(1, 4, 1)  # names at the very start of a row, with nothing before them, are left aside
at_name = grams[(grams[..., 1:] >= task.first_letter).all(-1)]  # a token, then the three letters
for order in (2, 3, 4):
    different, times = at_name[:, -order:].unique(dim=0, return_counts=True)
    print(f"order {order}: {len(different):,} different n-grams end a name, each met {times.float().mean():.1f} times")
assert len(at_name[:, -3:].unique(dim=0)) == 512

# %% [markdown]
# Here the longest n-gram adds next to nothing: with another token before it, the same name is another 4-gram, and each
# was met about twice. Pairs are met most often, but a pair ends several names. Three letters are the name.
#
# In real text nobody knows beforehand how long a fact is. So all orders are read, and the projections learn which to
# trust. (That reason is ours.)

# %% [markdown]
# ## Guess before running: smaller tables, and one of random numbers
#
# Does a name's value stand *in* the rows? Or are they only labels, by which the layers behind know a name? We teach
# toys with a usual table, and toys with one *frozen* at its first random numbers: it can store nothing.

# %% [markdown]
# The knob is `engram_vocab_size`, the least number of rows in a column, from 256 down to four, where dozens of names
# share each row. Draw the share of right names against it, for both. (For speed: new toys, two layers with windows,
# names only, 56 steps, the frozen ones at both ends alone.)

# %%
names_only = Facts(n_names=512, n_facts=0, n_mentions=5)
windows = {"num_hidden_layers": 2, "compress_ratios": (0, 0), "kv_source_layer_ids": (), "index_source_layer_ids": ()}


def taught(rows, frozen=False, **changes):
    """A small toy that was taught the book with a table of some size."""
    small = ds.Model(facts_config(names_only, rows=rows, **windows, **changes), seed=0)
    if frozen:
        small.layers[1].engram.embed.weight.requires_grad_(False)
    ds.train(small, names_only, steps=56, batch_size=32, length=names_only.shortest, learning_rate=4e-3, seed=0)
    return share(recall(small, names_only).names)


sizes = (4, 32, 256)
none = taught(4, engram_layer_ids=())
print(f"no table: {none:.3f}")
trained, random = {rows: taught(rows) for rows in sizes}, {rows: taught(rows, frozen=True) for rows in (4, 256)}

# %%
for rows in sizes:
    columns = table_primes(facts_config(names_only, rows=rows))[0]
    print(f"engram_vocab_size {rows:3}: {512 / columns[3]:5.1f} to {512 / columns[0]:5.1f} names per row of a pair or"
          f" triple; names right {trained[rows]:.3f}"
          + (f", frozen {random[rows]:.3f}, gap {trained[rows] - random[rows]:.3f}" if rows in random else ""))

# %%
curves = [Curve("trained table", trained), Curve("frozen table", random, kind=2, look=2)]
ax = plot_accuracy(curves, setting="engram_vocab_size, each toy trained with its own", model="small toys, names",
                   baselines={"no table": none, "blind guess": 1 / 16}, log=True)
assert min(trained[4], random[4]) > none + 0.05 and trained[256] > random[256] + 0.15
assert trained[4] < trained[32] < trained[256]
assert trained[4] - random[4] < trained[256] - random[256]

# %% [markdown]
# **The surprise.** Random numbers that never change help. They label n-grams, and with labels the layers learn names
# faster than from letters alone.
#
# What *training the rows* adds is the gap between the curves. It opens as fewer names share a row. But even where
# dozens collide in every row, more names are right than without a table.
#
# What the plot does not show: longer training, a larger book, another seed. Small differences, of a few hundredths,
# may be luck.

# %% [markdown]
# ## Hits and misses: does the gate know?
#
# One text through the toy that was trained on names and needles: each token with its four gates below it, one per
# stream.
#
# **Guess first:** a table has nothing to say about fillers, keys and values. Is the gate shut there?

# %%
ids, _, wanted = task.batch(step=0, batch_size=64, length=task.shortest, seed=1)
ids, trace = ids[:, :-1], ds.Trace("layers.1.engram.gate")
with torch.no_grad():
    model(ids, trace=trace)
ax = plot_engram_gates(token_gates(trace, config, [words[token] for token in ids[0]]), model="the toy")

# %%
mean_gate = trace["layers.1.engram.gate"].mean(-1)
letter, filler = ids >= task.first_letter, (ids >= task.first_filler) & (ids < task.first_letter)
last = (wanted >= 0) & letter
kinds = {"last letter of a name": last, "other letter": letter & ~last, "filler": filler,
         "key or value": ids < task.first_filler}
opened = {kind: mean_gate[mask].mean().item() for kind, mask in kinds.items()}
for kind, value in opened.items():
    print(f"{kind:21}: mean gate {value:.2f} at {int(kinds[kind].sum()):4} tokens")
assert opened["last letter of a name"] > opened["filler"] + 0.1 and opened["filler"] > 0.2

# %% [markdown]
# **A hit and a miss.** The gate is widest where a name ends. But elsewhere it is not shut, not even at fillers, where
# no answer is ever wanted. Why it does not close there, these numbers do not say.
#
# **Guess first:** the toy was taught texts of 34 tokens. What becomes of names and of needles in longer ones?

# %%
for length in (34, 66, 130, 258):
    longer = recall(model, task, length=length, n_rows=60)
    print(f"{length:4} tokens: names {share(longer.names):.3f}, needles {share(longer.needles):.3f}")
assert share(longer.names) > 0.85 and share(longer.needles) < share(known.needles)

# %% [markdown]
# To look a name up it hardly matters how much text there is. Finding a needle suffers, though only by a few
# hundredths.

# %% [markdown]
# ## What it costs
#
# Back to the released sizes, per generated token at a context of a million.
#
# **Guess first:** what is more, the bytes of Engram rows that a token reads, or the bytes of one layer's sliding window
# (lesson 02)?

# %% tags=["nbval-check-output"]
costs = DecodeTraffic(flash).at(2**20)
window = kv_bytes(flash).window_bytes // flash.num_hidden_layers
for name, size in {"weights": costs.weights, "cache": costs.cache, "window of one layer": window,
                   "Engram rows": costs.engram_rows}.items():
    print(f"{name:20}{size:>14,} bytes read, {size / costs.total:.4%}")
projections = counted.engram_projections
part = projections / counted.active_decode
print(f"Engram's projections: {projections / 1e9:.3f}B numbers, {part:.1%} of those that a token is multiplied with")
assert costs.engram_rows == 12_672 < window

# %% [markdown]
# So the rows themselves cost next to nothing to read; they cost *room*: 202.8 GB. They need not lie in the
# accelerator's memory: addresses follow from token ids, so rows can be sent for before layer 1 needs them. Host memory
# or a file on disk will do.
#
# The cache does not grow by Engram, nor does the candidate pool (lesson 05) change. What a token does pay is the work
# in the projections.

# %% tags=["nbval-check-output"]
tables = n_rows * row
caches = tables / kv_bytes(flash).bytes_at(2**20)
print(f"{tables / 1e9:.1f} GB in front of layers {flash.engram_layer_ids}:",
      f"as much as the caches of {caches:.0f} sequences of a million tokens")
with_tables, without = (kv_bytes(flash.replace(**changes)).bytes_per_token for changes in ({}, off))
assert with_tables == without == 890

# %% [markdown]
# ## The table leaves memory
#
# Let us do that. `engram_to_host` writes the toy's table into a file and frees it. From then on the toy reads from the
# file the rows that a text asks for, and no others.
#
# **Guess first:** the file holds 8-bit numbers where the table held 32-bit ones. How much do the toy's logits change?

# %% tags=["nbval-check-output"]
folder = tempfile.TemporaryDirectory()
hosted = copy.deepcopy(model)
reader = engram_host.engram_to_host(hosted, folder.name)[1]
with torch.no_grad():
    change = (hosted(ids) - model(ids)).abs().max().item()
held = [sum(p.nbytes for p in one.parameters()) for one in (model, hosted)]
print(f"weights in memory: {held[0]:,} bytes before, {held[1]:,} now; the file: {reader.table.apparent_bytes:,} bytes")
print(f"{ids.numel():,} tokens asked for {reader.reads.rows:,} rows; largest change of a logit: {change}")
assert change == 0 and held[0] - held[1] == 4 * reader.table.n_rows * reader.table.width

# %% [markdown]
# Nothing changes, not one bit. The model rounds a row to 8 bits whenever it reads it, so the file has all that it ever
# used. What no longer works is training the table: a file is only read.

# %% [markdown]
# Now the first table of `flash`, 101 GB. We write one token's rows into an otherwise empty file: what was never written
# takes no room on the disk. (A file system that would fill the file up is refused: then let `TMPDIR` name a folder
# elsewhere. Random ids stand for a text; the released tokenizer is not here.)
#
# **Guess first:** a disk hands out *pages* of 4,096 bytes, never less. How many times what it needs does this token
# fetch?

# %% tags=["nbval-check-output"]
layer, pad = flash.engram_layer_ids[0], flash.engram_pad_token_id
text = torch.randint(0, flash.engram_compressed_vocab_size, (4,)).tolist()
odd = multipliers(layer, flash.engram_compressed_vocab_size, flash.engram_max_ngram_size).tolist()
wanted_rows = torch.tensor(addresses(text, 3, odd, table_primes(flash)[0], flash.engram_n_heads, pad))
values = torch.randn(len(wanted_rows), flash.engram_head_dim)
path = f"{folder.name}/released_size"
with host_writer.new_table(path, flash, 0) as writer:
    writer.scatter(wanted_rows, values)
table = host_table.HostTable(path, flash, 0)
assert torch.equal(table.take(wanted_rows), ENGRAM.fake_quant(values))

# %% tags=["nbval-check-output"]
first_byte = host_layout.HEADER_BYTES + wanted_rows * table.row_bytes
pages = torch.cat([first_byte, first_byte + table.row_bytes - 1]).div(4096, rounding_mode="floor").unique()
needed, moved = table.row_bytes * len(wanted_rows), 4096 * len(pages)
small = table.stored_bytes < 1e6
print(f"a file of {table.apparent_bytes / 1e9:.0f} GB, less than a megabyte of it on the disk: {small}")
print(f"{len(wanted_rows)} rows of {table.row_bytes} bytes on {len(pages)} pages: {needed:,} bytes needed, {moved:,}"
      f" fetched, {moved / needed:.1f} times as many")
assert moved / needed > 15 and table.apparent_bytes == host_layout.HEADER_BYTES + flash.engram_num_embeddings[0] * row

# %% [markdown]
# Each row lies somewhere else: a hash scatters neighbours. So from a disk a token fetches many times what it needs, in
# single pages, each of which has to be waited for. Host memory is read in far smaller pieces: there the released system
# keeps its tables.
#
# `tinyds41 bench engram` times both, and how much of the reading is hidden: a thread reads the rows of the next part of
# a prompt while earlier layers compute.

# %% [markdown]
# ## Exercise 1
#
# `flash` gets n-grams of up to five tokens instead of four, and rows of 128 numbers instead of 256. All else stays. How
# many bytes of rows does a token then read, both tables together?
#
# <details><summary>Hint</summary>
#
# How many orders are there now? Each number takes a byte, and each 32 of them one more for their scale.
#
# </details>

# %%
bytes_read = ...
check_bytes(bytes_read)

# %% [markdown]
# ## Exercise 2
#
# Count collisions in one column of order 2. Write a function of the token ids of a text, the list of multipliers
# $a_0, a_1$, and the prime $p$: how many *different* pairs of neighbours have a row that another pair of the text has
# too? No pads here: the text's first token ends no pair.
#
# <details><summary>Hint</summary>
#
# A pair that stands twice in the text is one pair. And $a_0$ belongs to the later token.
#
# </details>

# %%
pairs_that_share = ...  # such as: lambda ids, multipliers, prime: 0
check_shared(pairs_that_share)

# %% [markdown]
# ## Exercise 3
#
# How strongly must stream and key agree? Write $t$ as a function of the gate $g$, for any $g$ between 0 and 1 except
# one half.
#
# <details><summary>Hint</summary>
#
# Turn the gate's equation round. A gate below a half comes from a negative $t$.
#
# </details>

# %%
t_of = ...  # such as: lambda g: 1.0
check_opening(t_of)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# They stand in the next cell, which is folded. It also shows that each check refuses a wrong answer.
#
# </details>

# %% jupyter={"source_hidden": true} tags=["solution"]
def sharing(ids, multipliers, prime):
    pairs = {(ids[place], ids[place - 1]) for place in range(1, len(ids))}
    rows = [(now * multipliers[0] ^ before * multipliers[1]) % prime for now, before in pairs]
    return sum(rows.count(row) > 1 for row in rows)


def opening(g):
    root = math.log(g / (1 - g))
    return math.copysign(root * root, root)


check_bytes(2 * 4 * 8 * (128 + 4))
check_shared(sharing)
check_opening(opening)
assert refuses(check_bytes, 12_672) and refuses(check_shared, lambda ids, multipliers, prime: len(set(ids)))
assert refuses(check_opening, lambda g: math.log(g / (1 - g)))

# %% [markdown]
# ## Recap
#
# - A token's last two, three and four ids are hashed to the numbers of rows. `flash` reads 48 of them, 12,672 bytes,
#   out of 202.8 GB. No layer has to run first.
# - Take the table away and names fall, needles stay; take the entries away and it is the other way round.
# - A table of random numbers already helps, as labels. Training the rows adds more, the fewer n-grams share them.
# - A gate opens where stream and key agree, and is not shut elsewhere.

# %% [markdown]
# [Technical report](https://arxiv.org/abs/2609.19969): §2.4.2. Before it: **lesson 05**, the sparse indexer. Next:
# **lesson 11**, drafts that are judged.

# %% [markdown]
# ## 中文小结
#
# 1. 用最近两到四个词元的编号做哈希得到行号：每个词元读 48 行，12,672 字节；整张表 202.8 GB。
# 2. 行号只取决于词元编号，各层计算之前就能去取，表可放在主机内存或文件里。
# 3. 关掉查表，名字答不出，上下文里的事实照样答得出；拿掉全局条目则相反。
# 4. 冻结的随机表已能给名字贴标签；训练行又添一份，共用一行的越少，添得越多。
# 5. 流与键一致时门打开，别处门并未关上；“腾出手来推理”本课没有证明。
