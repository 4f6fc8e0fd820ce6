"""Engram: addresses to the last bit, the gate, and which positions are dead."""

from __future__ import annotations

import math

import pytest
import torch
from goldens import load
from models import NANO, PAD, context, random_ids, scattered, traced
from torch import Tensor

from tinyds41.config import Config
from tinyds41.formats import ENGRAM
from tinyds41.model.context import Sequence
from tinyds41.model.engram import Engram, compress_look_back, hash_rows, multipliers, table_primes
from tinyds41.model.transformer import Model

GOLDEN = load("engram_unit")
FLASH = Config.preset("flash")
# The golden's vocabulary, bucket size and heads.
UNIT = NANO.replace(
    vocab_size=330, engram_vocab_size=23, engram_num_embeddings=[204, 358], engram_compressed_vocab_size=260
)
TABLES = [0, 1]


def unit_engram(dtype: torch.dtype) -> Engram:
    """Table 0 of the golden."""
    engram = Engram(UNIT, 0).to(dtype)
    engram.load_state_dict({name: GOLDEN[f"engram.param.{name}"].to(dtype) for name in engram.state_dict()})
    return engram


def unit_rows(table: int, dead: Tensor, documents: Tensor | None = None) -> Tensor:
    """Rows of the golden's ids, [2,24,6]."""
    ids, token_map = GOLDEN["input_ids"].long(), GOLDEN["compressed_map"].long()
    back = Sequence(UNIT, ids, documents).look_back(ids, 4)
    dead_back = Sequence(UNIT, ids, documents).look_back(dead.long(), 4) == 1
    compressed = compress_look_back(back, token_map, dead_back, int(GOLDEN["pad_compressed_id"]))
    return hash_rows(compressed, GOLDEN["multipliers"][table], GOLDEN["primes"][table].long(), 2)


# ---- addresses ----


def test_primes_and_multipliers_equal_the_golden():
    """With 260 compressed ids the multipliers pass 2^53: a double would lose their last bits."""
    assert GOLDEN["multipliers"].max() > 2**53
    assert table_primes(UNIT) == GOLDEN["primes"].tolist()
    for table, layer in enumerate(UNIT.engram_layer_ids):
        assert torch.equal(multipliers(layer, 260, 4), GOLDEN["multipliers"][table])


def test_primes_and_multipliers_of_the_released_model_are_equal():
    """The primes add up to the released row counts, the multipliers are odd and cannot overflow."""
    primes = table_primes(FLASH)
    for table, layer in enumerate(FLASH.engram_layer_ids):
        assert primes[table] == GOLDEN[f"released.primes.{layer}"].tolist()
        assert sum(primes[table]) == FLASH.engram_num_embeddings[table]
        found = multipliers(layer, 99092, 4)
        assert torch.equal(found, GOLDEN[f"released.multipliers.{layer}"])
        assert all(value % 2 == 1 for value in found.tolist())
    assert found.max() < 2**63 / 99092


@pytest.mark.parametrize("table", TABLES)
def test_rows_equal_the_golden_plain_masked_and_packed(table):
    none = torch.zeros(2, 24, dtype=torch.bool)
    assert torch.equal(unit_rows(table, none), GOLDEN["hash"][:, :, table].long())
    masked = GOLDEN["token_mask"] == 0
    assert torch.equal(unit_rows(table, masked), GOLDEN["hash_masked"][:, :, table].long())
    documents = GOLDEN["sequence_ids"].long()
    packed = unit_rows(table, documents == 0, documents)
    assert torch.equal(packed, GOLDEN["hash_packed"][:, :, table].long())


def test_rows_equal_python_integers_at_the_largest_ids():
    """Products near 2^63 at every look-back, every order and head: nothing wraps."""
    multiplier, primes = multipliers(14, 99092, 4), table_primes(FLASH)[1]
    ids = [[99091, 99091, 99091, 99091], [99091, 0, 99090, 2], [1, 99089, 99091, 99091]]
    rows = hash_rows(torch.tensor(ids), multiplier, torch.tensor(primes), 8)
    for back, found in zip(ids, rows.tolist(), strict=True):
        x, offset, expected = back[0] * int(multiplier[0]), 0, []
        for order in range(1, 4):
            x ^= back[order] * int(multiplier[order])
            assert 0 <= x < 2**63
            for prime in primes[8 * (order - 1) : 8 * order]:
                expected.append(x % prime + offset)
                offset += prime
        assert found == expected


def test_the_first_three_tokens_look_back_at_pads():
    """In each row of the batch, whatever the other row holds; order 2 needs one token, order 4 three."""
    engram = scattered().layers[1].engram
    ids = random_ids(2, 6)
    back = context(NANO, 6, 2).look_back(ids, 4)
    assert back[:, 0].tolist() == [[int(row[0]), -1, -1, -1] for row in ids]
    assert back[:, 2].tolist() == [[*row[:3].flip(0).tolist(), -1] for row in ids]
    rows = engram.rows(back)
    padded = torch.cat([torch.full((2, 3), PAD), ids], 1)
    by_hand = torch.stack([padded[:, 3 - i : 9 - i] for i in range(4)], -1)
    assert torch.equal(rows, hash_rows(by_hand, engram.multipliers, engram.primes, 2))
    alone = engram.rows(context(NANO, 6, 1).look_back(ids[1:], 4))
    assert torch.equal(rows[1:], alone)


def test_a_dead_token_is_a_pad_and_hides_what_lies_before_it():
    """Nearest first: from the dead token on, every compressed id is the pad's."""
    token_map = torch.tensor([7, 8, 5, 9, 6])
    ids = torch.tensor([[0, 1, 3, 4], [0, 1, 3, 4], [0, 1, -1, 4]])
    dead = torch.tensor([[False, True, False, False], [True, False, False, False], [False] * 4])
    assert compress_look_back(ids, token_map, dead, 5).tolist() == [[7, 5, 5, 5], [5, 5, 5, 5], [7, 8, 5, 5]]


def test_a_pad_in_the_text_breaks_the_n_grams_of_its_successors():
    """Three tokens later nothing is left of it; 2 is nano's pad."""
    model, ids = scattered(), random_ids(1, 9)
    changed = ids.clone()
    ids[0, 3], changed[0, 3] = PAD, PAD
    changed[0, 2] = (ids[0, 2] - 3) % 60 + 4
    rows, other = (traced(model, x, "*.rows")["layers.1.engram.rows"][0] for x in (ids, changed))
    assert not torch.equal(rows[2], other[2])
    assert torch.equal(rows[3:], other[3:])
    gate = traced(model, ids, "*.gate")["layers.1.engram.gate"][0]
    assert torch.equal(gate[3], torch.zeros(4, dtype=gate.dtype))
    assert (gate[[2, 4]] > 0).all()


def test_padding_shuts_the_gate_whatever_ids_it_holds():
    documents = torch.tensor([[-1, -1, 0, 0, 0, -1]])
    trace = traced(scattered(), random_ids(1, 6), "*.gate", documents=documents)
    for layer in (1, 3):
        alive = (trace[f"layers.{layer}.engram.gate"][0] > 0).all(-1)
        assert alive.tolist() == [False, False, True, True, True, False]


def test_tokens_of_one_compressed_id_share_their_rows():
    """64 tokens onto 40 ids, backwards: 39 and above all become 0, the pad becomes 37."""
    token_map = (39 - torch.arange(64)).clamp(min=0)
    model = scattered(NANO.replace(engram_compressed_vocab_size=40), token_map=token_map)
    ids = random_ids(1, 8)
    twin = torch.where(ids >= 39, (ids - 39 + 1) % 25 + 39, ids)
    assert not torch.equal(ids, twin)
    for layer in (1, 3):
        rows, other = (traced(model, x, "*.rows")[f"layers.{layer}.engram.rows"] for x in (ids, twin))
        assert torch.equal(rows, other)
        engram, first = model.layers[layer].engram, torch.tensor([int(token_map[ids[0, 0]]), 37, 37, 37])
        assert torch.equal(rows[0, 0], hash_rows(first, engram.multipliers, engram.primes, 2))


def test_each_layer_has_multipliers_and_primes_of_its_own():
    first, second = (scattered().layers[layer].engram for layer in NANO.engram_layer_ids)
    assert torch.equal(first.multipliers, multipliers(1, 64, 4))
    assert torch.equal(second.multipliers, multipliers(3, 64, 4))
    assert not set(first.primes.tolist()) & set(second.primes.tolist())


# ---- gate ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gate_and_output_equal_the_golden(dtype):
    """1e-6: float32 data of values up to 4. The table is exact in FP8, so rounding its rows changes nothing."""
    engram, x = unit_engram(dtype), GOLDEN["engram.x"].to(dtype)
    with torch.no_grad():
        for name, rows, alive in (("y", "hash", torch.ones(2, 24, dtype=torch.bool)),
                                  ("y_masked", "hash_masked", GOLDEN["token_mask"].bool())):  # fmt: skip
            memory = engram.embed(GOLDEN[rows][:, :, 0].long())
            assert torch.equal(ENGRAM.fake_quant(memory), memory)
            y, gate, _ = engram.read(x, memory.flatten(2), alive)
            torch.testing.assert_close(y.float(), GOLDEN[f"engram.{name}"], rtol=0, atol=1e-6)
            if name == "y":
                torch.testing.assert_close(gate.float(), GOLDEN["engram.gate"], rtol=0, atol=1e-6)


def test_a_zero_stream_opens_the_gate_to_0_50025():
    """sigmoid(sqrt(1e-6)): the sign of 0 counts as +, and the root starts at 1e-6."""
    engram = unit_engram(torch.float64)
    memory = torch.randn(1, 1, 192, dtype=torch.float64)
    _, gate, _ = engram.read(torch.zeros(1, 1, 4, 32, dtype=torch.float64), memory, torch.ones(1, 1, dtype=torch.bool))
    assert gate.flatten().tolist() == pytest.approx([1 / (1 + math.exp(-1e-3))] * 4, abs=1e-12)
    assert gate[0, 0, 0].item() == pytest.approx(0.50025, abs=1e-7)


def test_the_gate_equals_the_equation_stream_by_stream():
    """Keys are stream-major, the value comes last; weights of both sides count. 1e-12 in float64."""
    engram = unit_engram(torch.float64)
    x, memory = torch.randn(1, 3, 4, 32, dtype=torch.float64), torch.randn(1, 3, 192, dtype=torch.float64)
    _, gate, value = engram.read(x, memory, torch.ones(1, 3, dtype=torch.bool))
    seen_signs = set()
    for s in range(3):
        projected = engram.wkv.weight @ memory[0, s]
        torch.testing.assert_close(value[0, s], projected[128:], rtol=0, atol=1e-12)
        for i in range(4):
            key, stream = projected[32 * i : 32 * i + 32], x[0, s, i]
            t = (stream * engram.q_weight[i] * engram.k_weight[i] * key).sum() / math.sqrt(32)
            t = (t / stream.square().mean().sqrt() / key.square().mean().sqrt()).item()
            root = math.copysign(math.sqrt(max(abs(t), 1e-6)), t)
            assert gate[0, s, i].item() == pytest.approx(1 / (1 + math.exp(-root)), abs=1e-12)
            seen_signs.add(t > 0)
    assert seen_signs == {True, False}


def test_each_stream_receives_the_value_through_its_own_gate():
    """What enters layer 1 minus what left layer 0; 1e-12 in float64, rows rounded to FP8 before."""
    model, ids = scattered(), random_ids(1, 7)
    bare = scattered(NANO)
    with torch.no_grad():
        bare.layers[1].engram.wkv.weight.zero_()
    trace = traced(model, ids)
    added = trace["layers.1.streams"] - traced(bare, ids)["layers.1.streams"]
    gate, value = trace["layers.1.engram.gate"], trace["layers.1.engram.value"]
    torch.testing.assert_close(added, gate.unsqueeze(-1) * value.unsqueeze(2), rtol=0, atol=1e-12)
    engram, rows = model.layers[1].engram, trace["layers.1.engram.rows"]
    with torch.no_grad():
        memory = ENGRAM.fake_quant(engram.embed.weight[rows]).flatten(2)
        torch.testing.assert_close(value, (memory @ engram.wkv.weight.T)[..., 128:], rtol=0, atol=1e-12)


# ---- bad input ----


def test_a_table_whose_rows_do_not_match_the_primes_is_refused():
    with pytest.raises(ValueError, match=r"engram_num_embeddings\[1\]=305, .*engram_vocab_size=16 add up to 304"):
        Model(NANO.replace(engram_num_embeddings=[156, 305]))


def test_a_compressed_vocabulary_needs_its_tokenizer():
    with pytest.raises(ValueError, match=r"engram_compressed_vocab_size=40 differs from vocab_size=64.*tokenizer"):
        Model(NANO.replace(engram_compressed_vocab_size=40))


def test_a_token_map_of_another_tokenizer_is_refused():
    with pytest.raises(ValueError, match="compresses to 40 ids, engram_compressed_vocab_size is 64"):
        Model(NANO, token_map=torch.arange(64).clamp(max=39))
    with pytest.raises(ValueError, match=r"token_map has shape \(63,\), vocab_size is 64"):
        Model(NANO, token_map=torch.arange(63))


def test_inputs_of_another_width_are_refused():
    engram, alive = unit_engram(torch.float32), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"streams: expected \[\.\.\., 32\], got \(1, 1, 4, 1\)"):
        engram.read(torch.zeros(1, 1, 4, 1), torch.zeros(1, 1, 192), alive)
    with pytest.raises(ValueError, match=r"memory: expected \[\.\.\., 192\], got \(1, 1, 191\)"):
        engram.read(torch.zeros(1, 1, 4, 32), torch.zeros(1, 1, 191), alive)
    with pytest.raises(ValueError, match=r"lookback: expected \[\.\.\., 4\], got \(1, 1, 3\)"):
        engram.rows(torch.zeros(1, 1, 3, dtype=torch.long))
