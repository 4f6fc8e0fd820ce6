"""A model whose Engram tables lie in files computes the same bits as with them in memory, and holds none of them."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from folders import nano_model, tokenizer_model
from host_tables import FLASH, LARGE, moved, random_table, reads, require_sparse_files
from models import NANO, PAD, random_ids, scattered, traced
from sessions import SHORT, without_engram

import tinyds41 as ds
from tinyds41.formats import ENGRAM
from tinyds41.infer import engram_host
from tinyds41.infer import host_rows as host_rows_module
from tinyds41.infer.engram_host import engram_to_host, host_rows, load_on_host, open_host_rows, table_file
from tinyds41.infer.generate import generate_ids
from tinyds41.infer.host_rows import HostRows
from tinyds41.infer.host_table import HostTable
from tinyds41.infer.host_writer import new_table
from tinyds41.model.engram import Engram, hash_rows
from tinyds41.model.transformer import Model
from tinyds41.train.losses import cross_entropy

# Engram in layer 1, and in layer 3 behind the decoder's boundary.
BOTH_HALVES = SHORT.replace(engram_layer_ids=[1, 3], engram_num_embeddings=[156, 304])


@pytest.fixture(scope="module")
def model():
    return scattered(SHORT)


# ---- the same bits ----


@pytest.mark.parametrize(("dtype", "rows"), [
    (torch.float32, 1), (torch.float64, 3), (torch.bfloat16, 2), (torch.float16, 1)])  # fmt: skip
def test_logits_are_the_same_bits(tmp_path, dtype, rows):
    """Dead tokens inside, padding on both sides, two documents in a row."""
    model, ids = scattered(SHORT, dtype), random_ids(rows, 11)
    host = moved(model, tmp_path)
    ids[:, 4] = PAD
    documents = torch.tensor([[-1, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1]]).expand(rows, -1)
    with torch.no_grad():
        for options in ({}, {"documents": documents}):
            assert torch.equal(host(ids, **options), model(ids, **options))
    assert host(ids[:, :3]).dtype == dtype and reads(host).rows == (11 + 11 + 3) * rows * 6


def test_logits_with_gradients_wanted_are_the_same_bits(tmp_path, model):
    """Then NumPy's short forms of the codec stay away."""
    ids = random_ids(2, 5)
    assert torch.equal(moved(model, tmp_path)(ids), model(ids))


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_a_session_is_the_same_in_every_bit(tmp_path, mode):
    """Prefill in chunks, rows of different length, decode, extend, truncate, a second prompt, generation."""
    model = scattered(BOTH_HALVES, torch.float32)
    host, ids = moved(model, tmp_path), random_ids(3, 13)
    mask = torch.arange(13) >= torch.tensor([[0], [11], [6]])
    sessions = [ds.Session(model), ds.Session(host)]
    steps = (lambda s: s.prefill(ids, mode=mode, chunk=5, mask=mask), lambda s: s.decode([5, 6, 7]),
             lambda s: s.extend(ids[:, :3]), lambda s: s.truncate([n - 2 for n in s.lengths]),
             lambda s: s.decode([8, PAD, 9]), lambda s: s.prefill(ids[:, :7], mode=mode, chunk=4, mask=mask[:, -7:]),
             lambda s: s.decode([1, 2, 3]))  # fmt: skip
    for step in steps:
        here, there = (step(session) for session in sessions)
        assert here is there is None or torch.equal(here, there)
        assert sessions[0].fingerprint() == sessions[1].fingerprint()


def test_generated_tokens_are_the_same(tmp_path, model):
    ids = random_ids(2, 5)
    host = moved(model, tmp_path)
    assert generate_ids(host, ids, max_new_tokens=6, seed=1) == generate_ids(model, ids, max_new_tokens=6, seed=1)


def test_text_is_continued_alike(tmp_path):
    """By a tokenizer whose ids are not those that Engram hashes; one prompt, two of other lengths, one token."""
    model = ds.example("text")
    host = moved(model, tmp_path)
    for prompt in ("To be, or not", ["Enter the king.", "O"]):
        here, there = (ds.generate(one, prompt, max_new_tokens=8, seed=1) for one in (model, host))
        assert here == there
    assert reads(host).rows > 0
    with pytest.raises(ValueError, match=r"engram_layer_ids=\[\]"):
        engram_to_host(ds.example("facts"), tmp_path / "facts")


def test_odd_ids_are_read_alike(tmp_path, model):
    """One token, the last ids of the vocabulary, ids that do not lie in a row; no ids at all are refused alike."""
    host = moved(model, tmp_path)
    last = model.config.vocab_size - 1
    for ids in (torch.tensor([[5]]), torch.full((2, 6), last), random_ids(5, 3).t(), random_ids(2, 9)[:, ::2]):
        assert torch.equal(host(ids), model(ids))
    for one in (host, model):
        with pytest.raises(ValueError, match=r"ids have shape \(1, 0\)"):
            one(torch.zeros(1, 0, dtype=torch.long))


def test_two_models_read_the_same_files(tmp_path):
    """Also after a third one's tables took their names."""
    ds.save(nano_model(), tmp_path / "model")
    both, ids = [load_on_host(tmp_path / "model", tmp_path / "tables") for _ in range(2)], random_ids(2, 7)
    sessions, expected = [ds.Session(one) for one in both], ds.Session(nano_model())
    for step in (lambda s: s.prefill(ids, chunk=3), lambda s: s.decode([5, 6])):
        logits = step(expected)
        assert all(torch.equal(step(session), logits) for session in sessions)
    other = nano_model()
    other.layers[1].engram.embed.weight.data.neg_()
    engram_to_host(other, tmp_path / "tables")
    logits = expected.decode([7, 8])
    assert all(torch.equal(session.decode([7, 8]), logits) for session in sessions)


def test_the_addresses_that_a_table_is_asked_for_look_back_within_their_row(tmp_path, monkeypatch):
    """E3, E4: the first tokens see pads, whatever another row of the batch holds; a dead token hides its past."""
    host, asked = moved(scattered(SHORT), tmp_path), []
    reader = host.layers[1].engram.embed
    monkeypatch.setattr(reader.table, "take", lambda index: asked.append(index) or torch.zeros(*index.shape, 32))
    reader.prefetch = False
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, PAD, 12, 13]])
    session = ds.Session(host)
    session.prefill(ids, mode="full", chunk=2)
    p = PAD
    back = [[[5, p, p, p], [6, 5, p, p], [7, 6, 5, p], [8, 7, 6, 5], [9, 8, 7, 6]],
            [[10, p, p, p], [11, 10, p, p], [p, p, p, p], [12, p, p, p], [13, 12, p, p]]]  # fmt: skip
    engram = host.layers[1].engram
    expected = hash_rows(torch.tensor(back), engram.multipliers, engram.primes, 2)
    assert torch.equal(torch.cat(asked, 1), expected)


# ---- what the model holds ----


def test_the_tables_are_freed(tmp_path):
    model = scattered()
    tables = [weakref.ref(model.layers[layer].engram.embed.weight) for layer in (1, 3)]
    before = sum(p.nbytes for p in model.parameters())
    readers = engram_to_host(model, tmp_path)
    gc.collect()
    assert [table() for table in tables] == [None, None] and list(readers) == [1, 3]
    assert before - sum(p.nbytes for p in model.parameters()) == (156 + 304) * 32 * 8
    assert not any("embed" in name for name in model.state_dict() if "engram" in name)
    assert host_rows(model) == readers and table_file(tmp_path, 3).stat().st_size == 4096 + 304 * 33


def test_a_model_with_tables_larger_than_memory_runs(tmp_path):
    """203 GB of which the rows of one prompt are written: what they hold is read."""
    require_sparse_files(tmp_path, 102 * 10**9)
    ids = random_ids(1, 4)
    for table, layer in enumerate(LARGE.engram_layer_ids):
        with new_table(table_file(tmp_path, layer), LARGE, table):
            pass
    model = Model(LARGE, engram=open_host_rows(tmp_path, LARGE))
    rows = traced(model, ids, "layers.1.engram.rows")["layers.1.engram.rows"].flatten()
    assert rows.max() > 2**27
    silent = traced(model, ids, "layers.1.engram.value")["layers.1.engram.value"]
    with new_table(table_file(tmp_path, 1), LARGE, 0) as writer:
        writer.scatter(rows, torch.randn(len(rows), 256))
    written = Model(LARGE, engram=open_host_rows(tmp_path, LARGE))
    torch.nn.init.normal_(written.layers[1].engram.wkv.weight)
    assert not silent.any()
    assert traced(written, ids, "layers.1.engram.value")["layers.1.engram.value"].all()
    assert sum(p.nbytes for p in written.parameters()) < 10**8


def test_training_moves_everything_but_the_rows(tmp_path):
    """As with a frozen table in memory: the same loss and the same gradients, and the file stays as it was."""
    frozen, ids = scattered(SHORT, torch.float32), random_ids(1, 6)
    host = moved(frozen, tmp_path)
    frozen.layers[1].engram.embed.weight.requires_grad_(False)
    before = table_file(tmp_path, 1).read_bytes()
    gradients = []
    for model in (frozen, host):
        cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and "layers.1.engram.wkv.weight" in gradients[1]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.sub_(0 if parameter.grad is None else parameter.grad)
    assert table_file(tmp_path, 1).read_bytes() == before


def test_a_copy_reads_the_same_file_with_counts_of_its_own(tmp_path, model):
    host, ids = moved(model, tmp_path), random_ids(1, 5)
    host(ids)
    twin = copy.deepcopy(host)
    assert reads(twin).rows == 0 and torch.equal(twin(ids), host(ids))
    assert (reads(twin).rows, reads(host).rows) == (30, 60)
    assert host_rows(twin)[1].least == 1


def test_a_variant_shares_the_files(tmp_path, model):
    host, ids = moved(model, tmp_path), random_ids(1, 9)
    changes = {"sliding_window": 2}
    assert torch.equal(ds.variant(host, **changes)(ids), ds.variant(model, **changes)(ids))
    assert host_rows(ds.variant(host, **changes)) == host_rows(host)
    bare = without_engram()
    less = ds.variant(host, engram_layer_ids=bare.engram_layer_ids, engram_num_embeddings=())
    assert less(ids).isfinite().all() and not host_rows(less)
    with pytest.raises(ValueError, match="quantize_engram=False reads rows unrounded"):
        ds.variant(host, quantize_engram=False)


# ---- folders ----


def test_a_whole_table_is_decoded_in_pieces(tmp_path, monkeypatch):
    table, weight = random_table(tmp_path / "t")
    taken, take = [], HostTable.take
    monkeypatch.setattr(HostTable, "take", lambda self, index: taken.append(len(index)) or take(self, index))
    monkeypatch.setattr(host_rows_module, "CHUNK_ROWS", 100)
    assert torch.equal(HostRows(table).weight, ENGRAM.fake_quant(weight)) and taken == [100, 56]


@pytest.mark.parametrize("quantize", [False, True])
def test_a_model_on_the_host_is_saved_with_its_tables(tmp_path, quantize):
    model = nano_model()
    host = moved(model, tmp_path / "tables")
    saved = ds.load(ds.save(host, tmp_path / "host", quantize=quantize))
    if not quantize:
        ids = torch.arange(3, 9)[None]
        assert torch.equal(saved(ids), model(ids))
    assert torch.equal(saved.layers[3].engram.table(), ENGRAM.fake_quant(model.layers[3].engram.table()))


@pytest.mark.parametrize(("options", "dtype"), [
    ({"max_shard_bytes": 100_000}, None), ({}, torch.bfloat16), ({"quantize": True}, None)])  # fmt: skip
def test_a_folder_loads_onto_the_host_as_into_memory(tmp_path, monkeypatch, options, dtype):
    """Rows written in pieces, rounded first to the model's dtype; then opened again, not written."""
    ids = torch.arange(3, 9)[None]
    monkeypatch.setattr(engram_host, "CHUNK_ROWS", 40)
    ds.save(nano_model(), tmp_path / "model", **options)
    expected = ds.load(tmp_path / "model", dtype=dtype)
    first = load_on_host(tmp_path / "model", tmp_path / "tables", dtype=dtype)
    stamp = table_file(tmp_path / "tables", 1).stat().st_mtime_ns
    second = load_on_host(tmp_path / "model", tmp_path / "tables", dtype=dtype)
    assert torch.equal(first(ids), expected(ids)) and torch.equal(second(ids), expected(ids))
    assert len(host_rows(second)) == 2 and second.dtype == expected.dtype
    assert table_file(tmp_path / "tables", 1).stat().st_mtime_ns == stamp


def test_the_first_layers_of_a_folder_load_onto_the_host(tmp_path):
    ds.save(nano_model(), tmp_path / "model")
    model = load_on_host(tmp_path / "model", tmp_path / "tables", layers=range(3))
    ids = torch.arange(3, 9)[None]
    assert list(host_rows(model)) == [1] and not table_file(tmp_path / "tables", 3).exists()
    assert torch.equal(model(ids), ds.load(tmp_path / "model", layers=range(3))(ids))


def test_a_tokenizer_comes_with_the_folder(tmp_path):
    model, ids = tokenizer_model(), torch.arange(3, 9)[None]
    ds.save(model, tmp_path / "model")
    assert torch.equal(load_on_host(tmp_path / "model", tmp_path / "tables")(ids), model(ids))


@pytest.mark.parametrize(("row", "pieces_of"), [(0, 40), (303, 40), (200, 1 << 16)])
def test_tables_of_another_training_are_refused(tmp_path, monkeypatch, row, pieces_of):
    """E5: same config, same sizes, other numbers. In a table of a single piece one row is enough, wherever it lies."""
    model = nano_model()
    ds.save(model, tmp_path / "model")
    with torch.no_grad():
        model.layers[3].engram.embed.weight[row] += 1
    engram_to_host(model, tmp_path / "tables")
    monkeypatch.setattr(engram_host, "CHUNK_ROWS", pieces_of)
    with pytest.raises(ValueError, match=rf"layer_03.engram has the rows of another model: row {row} differs"):
        load_on_host(tmp_path / "model", tmp_path / "tables")


@pytest.mark.parametrize("n_rows", [2**25 + 4, 2**25 + 2, *FLASH.engram_num_embeddings])
def test_compared_rows_of_a_long_table_reach_its_last_one(n_rows):
    """Row numbers above 2^24 are no float32 numbers."""
    pieces = engram_host._compared(n_rows)
    assert pieces[0] == (0, 1) and pieces[-1] == (n_rows - 1, n_rows)
    assert len(pieces) == engram_host.SAMPLED and pieces == sorted(set(pieces))


# ---- refusals ----


def test_what_cannot_move_is_refused(tmp_path, model):
    with pytest.raises(ValueError, match=r"no Engram tables in memory: engram_layer_ids=\[\]"):
        engram_to_host(scattered(without_engram()), tmp_path)
    with pytest.raises(ValueError, match="no Engram tables in memory"):
        engram_to_host(moved(model, tmp_path / "tables"), tmp_path)
    with pytest.raises(ValueError, match="quantize_engram=False: the model reads its rows unrounded"):
        engram_to_host(scattered(SHORT.replace(quantize_engram=False)), tmp_path)
    with pytest.raises(ValueError, match="meta device"):
        engram_to_host(Model(SHORT, device="meta"), tmp_path)


def test_a_table_of_another_size_does_not_become_a_models(tmp_path):
    """E5 once more: a reader that was opened for another config."""
    reader = HostRows(random_table(tmp_path / "t")[0])
    with pytest.raises(ValueError, match=r"layers\.3\.engram: a table of shape \(156, 32\), .* is \(304, 32\)"):
        Model(NANO, engram={3: reader})
    with pytest.raises(ValueError, match=r"engram=\[2\]: the layers with Engram are \[1, 3\]"):
        Model(NANO, engram={2: reader})
    with pytest.raises(ValueError, match="quantize_engram=False"):
        Engram(NANO.replace(quantize_engram=False), 0, reader)


def test_a_table_that_cannot_be_written_leaves_the_model_as_it_was(tmp_path):
    model, ids = scattered(), random_ids(1, 5)
    expected = model(ids)
    table_file(tmp_path, 3).mkdir()
    with pytest.raises(OSError, match="layer_03"):
        engram_to_host(model, tmp_path)
    assert torch.equal(model(ids), expected) and not host_rows(model)
    assert all(engram.owns_table for engram in model.engrams.values())
