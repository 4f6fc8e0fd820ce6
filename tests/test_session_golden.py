"""Sessions against toy A of two public implementations: at once, in chunks, token by token."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from goldens import load
from models import toy_a_model
from torch import Tensor

from tinyds41.formats import GLOBAL, INDEX
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model
from tinyds41.trace import Trace

GOLDEN = load("toyA_golden")
IDS = GOLDEN["tokens"].long()
POSITIONS = GOLDEN["f64_positions"].long()
NAMES = ("*.selection", "*.pool", "*.ffn.experts")
# How the 96 tokens are cut; W = 8 and m = 2. "tokens" reads all of them one by one.
PIECES = {"at once": [96], "pieces": [7, 1, 8, 9, 16, 1, 1, 17, 36], "tokens": [1] * 96}


@cache
def model(dtype: torch.dtype, quantize: bool) -> Model:
    return toy_a_model(dtype, quantize_cache=quantize)


def run(pieces: str, dtype: torch.dtype = torch.float64, quantize: bool = True):
    """Logits [T,V], the traces of all pieces, and the session behind them."""
    return _run(pieces, dtype, quantize)


@cache  # a call with defaults and one that names them are two keys
def _run(pieces: str, dtype: torch.dtype, quantize: bool) -> tuple[Tensor, list[dict[str, Tensor]], Session]:
    session, logits, kept = Session(model(dtype, quantize)), [], []
    for part in IDS[None].split(PIECES[pieces], 1):
        trace = Trace(*NAMES)
        logits.append(session.extend(part, trace=trace))
        kept.append(dict(trace))
    return torch.cat(logits, 1)[0], kept, session


def column(kept: list[dict[str, Tensor]], name: str) -> Tensor:
    """A traced name over all tokens; a shorter store chose fewer, filled up with -1."""
    width = max(part[name].shape[-1] for part in kept)
    return torch.cat([torch.nn.functional.pad(p[name][0], (0, width - p[name].shape[-1]), value=-1) for p in kept])


@pytest.mark.parametrize(("pieces", "quantize"), [("at once", True), ("pieces", True), ("tokens", True),
                                                  ("pieces", False)])  # fmt: skip
def test_float64_logits_are_equal(pieces, quantize):
    """1e-9 is what the goldens promise."""
    expected = GOLDEN["logits_f64" if quantize else "logits_noquant_f64"]
    logits = run(pieces, quantize=quantize)[0][POSITIONS]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("pieces", PIECES)
def test_choices_are_equal(pieces):
    """Selections, pool and routed experts of every token."""
    kept = run(pieces)[1]
    for source in (2, 5, 7, 9):
        assert torch.equal(column(kept, f"layers.{source}.indexer.selection"), GOLDEN[f"topk.{source}"].long())
    pool, mask = column(kept, "layers.5.indexer.pool"), torch.zeros(96, 25, dtype=torch.uint8)
    mask.scatter_(1, pool.masked_fill(pool < 0, 24), 1)  # column 24 collects what is absent
    assert torch.equal(mask[:, :24], GOLDEN["candidate_blocks.5"])
    experts = torch.stack([column(kept, f"layers.{layer}.ffn.experts") for layer in range(10)])
    assert torch.equal(experts, GOLDEN["router_experts"].long())


@pytest.mark.parametrize("pieces", PIECES)
def test_stored_bytes_decode_to_the_cached_rows_of_the_peers(pieces):
    """Bit for bit, and C4, C9: entry j turned by position 2j, keys taken before that."""
    source = run(pieces)[2].cache.sources[2]
    assert torch.equal(GLOBAL.decode(source.kv.stored(0), 32), GOLDEN["first_compressed_kv"])
    assert torch.equal(INDEX.decode(source.keys.stored(0), 32), GOLDEN["first_index_keys"])


def test_all_ways_store_the_same_bytes():
    assert len({run(pieces)[2].fingerprint() for pieces in PIECES}) == 1


def test_float32_pieces_in_the_median():
    """As in test_model_golden.py: a value on a rounding midpoint may fall the other way, the median is the test."""
    difference = (run("pieces", torch.float32)[0] - GOLDEN["logits"]).abs().amax(-1)
    assert difference.median() < 1e-4


def test_float32_pieces_without_quantisers():
    """2e-4: twice what the two peers differ by on random toys (1.1e-4)."""
    logits = run("pieces", torch.float32, quantize=False)[0]
    torch.testing.assert_close(logits, GOLDEN["logits_noquant"], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("quantize", "chunk"), [(True, 13), (True, 1000), (False, 13)])
def test_an_exact_prefill_ends_in_the_golden_logits(quantize, chunk):
    """The decoder runs on 8 + 4 * 7 = 36 of 96 tokens; the last position is among those of the golden."""
    assert int(POSITIONS[-1]) == 95
    session = Session(model(torch.float64, quantize))
    logits = session.prefill(IDS, chunk=chunk)
    expected = GOLDEN["logits_f64" if quantize else "logits_noquant_f64"][-1:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert session.counters.tokens_run == dict.fromkeys(range(5), 96) | dict.fromkeys(range(5, 10), 36)
