"""What NumPy computes for a few tokens is what PyTorch computes for many; a watched run takes PyTorch's way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from models import NANO, random_ids, scatter, scattered
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tinyds41 import few_codec, few_index, few_tokens, selection
from tinyds41.cost.flops import linear_flops
from tinyds41.experts import experts, swiglu
from tinyds41.formats import ENGRAM, GLOBAL, INDEX, WINDOW, Rows
from tinyds41.infer.session import Session
from tinyds41.mixing import hyper_coefficients, hyper_step
from tinyds41.model.linear import Linear
from tinyds41.model.moe import Gate
from tinyds41.model.norm import RMSNorm
from tinyds41.model.rope import Rope, rotate
from tinyds41.ops import Selection, Window, attend, score_and_select, select_top

# Sums in another order, in float64.
TOLERANCE = 1e-12
FORMATS = (WINDOW, GLOBAL, INDEX, ENGRAM)


class Watched(TorchDispatchMode):
    """Lets every operation pass, and has PyTorch compute it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def spied(monkeypatch, module, name: str) -> Iterator[list[int]]:
    """Counts calls of one function."""
    calls, function = [], getattr(module, name)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *a, **k: (calls.append(1), function(*a, **k))[1])
        yield calls


def both(monkeypatch, module, name: str, function: Callable[[], Tensor | tuple | None]):
    """A function's results by NumPy's `name` and by PyTorch, having made sure of who computed them."""
    with torch.no_grad(), spied(monkeypatch, module, name) as calls:
        few = function()
        assert calls, f"{name} was not called"
        calls.clear()
        with Watched():
            plain = function()
        assert not calls, f"{name} was called in a watched run"
    return few, plain


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_close(few, plain, tolerance: float = TOLERANCE) -> None:
    for mine, theirs in zip(few, plain, strict=True) if isinstance(few, tuple) else [(few, plain)]:
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert (mine - theirs).abs().max() <= tolerance


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_norm(monkeypatch, tokens):
    norm = RMSNorm(12, 0.3).double()  # an eps that shows
    scatter(norm)
    x = randn(1, tokens, 12)
    assert_close(*both(monkeypatch, few_tokens, "norm", lambda: norm(x)))


def test_a_matrix(monkeypatch):
    layer, x = Linear(12, 7).double(), randn(1, 1, 12)
    assert_close(*both(monkeypatch, few_tokens, "linear", lambda: layer(x)))


@pytest.mark.parametrize("back", [False, True])
def test_a_rotation_and_back(monkeypatch, back):
    rotation = Rope(NANO, compressed=True).rotation(torch.tensor([[3, 77]]), torch.float64).unsqueeze(-2)
    rotation, x = rotation.conj() if back else rotation, randn(1, 2, 3, 32)
    before = x.clone()
    assert_close(*both(monkeypatch, few_tokens, "rotate", lambda: rotate(x, rotation)))
    assert torch.equal(x, before)


@pytest.mark.parametrize("rows", [1, 3])
def test_an_expert_on_both_sides_of_its_limits(monkeypatch, rows):
    """One row by NumPy, several by shared products. Also where e^-x overflows: silu is 0 there."""
    matrices, x = (randn(8, 6), randn(6, 8), randn(8, 6)), 20 * randn(rows, 6)
    assert_close(*both(monkeypatch, few_tokens, "swiglu", lambda: swiglu(x, *matrices, 10.0)))
    x = torch.full((1, 1), 1000.0)
    one = torch.ones(1, 1)
    with torch.no_grad():
        assert swiglu(x, -one, one, one, 10.0).item() == 0


def test_chosen_experts(monkeypatch):
    matrices = randn(4, 8, 6), randn(4, 6, 8), randn(4, 8, 6)
    index, weight, x = torch.tensor([[0, 3], [1, 2], [0, 2]]), randn(3, 2), randn(3, 6)
    run = lambda: experts(x, index, weight, *matrices, 10.0)
    assert_close(*both(monkeypatch, few_tokens, "experts", run))


def test_a_gate_chooses_with_the_bias_and_weighs_without(monkeypatch):
    gate, x = Gate(NANO).double(), randn(1, 4, 32)
    torch.nn.init.zeros_(gate.weight)
    scatter(gate)
    with torch.no_grad():
        unpushed = gate(x)[1]
        gate.bias[NANO.n_routed_experts - 1] = 9  # far above any score: chosen by every token
    few, plain = both(monkeypatch, few_tokens, "gate", lambda: gate(x))
    assert torch.equal(few[1], plain[1]) and not torch.equal(few[1], unpushed)
    assert_close(few, plain)


def test_a_gate_breaks_ties_downwards():
    gate = Gate(NANO)
    torch.nn.init.zeros_(gate.weight)
    with torch.no_grad():
        assert gate(torch.randn(1, 1, 32))[1].tolist() == [[[0, 1]]]


@pytest.mark.parametrize("k", [1, 3, 8, 64])
def test_a_choice_with_ties_and_missing_scores(monkeypatch, k):
    scores = torch.randint(-2, 3, (2, 3, 40)).double()
    scores[scores == -2] = -torch.inf
    scores[scores == 0] *= -1  # -0.0 is no less than 0.0
    scores[0, 0] = -torch.inf
    few, plain = both(monkeypatch, few_tokens, "select_top", lambda: select_top(scores, k))
    assert torch.equal(few, plain)


@pytest.mark.parametrize("k", [1, 3, 8, 64])
@pytest.mark.parametrize("levels", [1, 4, 1000])
def test_a_choice_among_many_scores(monkeypatch, k, levels):
    scores = torch.randint(0, levels, (2, 20, 300)).double()
    scores[torch.rand(scores.shape) < 0.3] = -torch.inf
    scores[0, :7, k - 1 :] = -torch.inf  # fewer than k
    partition, plain = both(monkeypatch, selection, "_chosen_by_partition", lambda: select_top(scores, k))
    assert torch.equal(partition, plain)


def test_a_score_that_is_no_number_counts_as_the_best_either_way():
    scores = torch.rand(20, 300)
    scores[3, 5] = torch.nan
    with torch.no_grad():
        chosen = select_top(scores, 4)
        with Watched():
            assert torch.equal(chosen, select_top(scores, 4))
    assert 5 in chosen[3].tolist()


@pytest.mark.parametrize("first", [[0, 0], [3, 5], [9, 9]])
@pytest.mark.parametrize("chosen", [True, False])
def test_attention_of_one_query(monkeypatch, first, chosen):
    """Windows that begin later, and choices that are missing; 9 is past the query's own row: nothing to see."""
    window = Window(Rows(randn(2, 9, 16)), torch.tensor(first).unsqueeze(1), 9)
    selection = Selection(torch.tensor([[[0, 2, -1]], [[-1, -1, -1]]]), Rows(randn(2, 4, 16))) if chosen else None
    q, sink = randn(2, 1, 3, 16), randn(3)
    few, plain = both(monkeypatch, few_tokens, "attend", lambda: attend(q, window, selection, sink))
    assert_close(few, plain)
    if first == [9, 9]:
        assert (few[1] == 0).all()


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_of_a_draft_block(monkeypatch, batch):
    """Queries that see rows behind themselves; the last of row 1 sees nothing."""
    first = torch.tensor([[2, 2, 0, 6], [0, 1, 5, 7]])[:batch]
    last = torch.tensor([[6, 6, 6, 6], [6, 3, 5, 6]])[:batch]
    window, q, sink = Window(Rows(randn(batch, 7, 16)), first, 8, last), randn(batch, 4, 3, 16), randn(3)
    few, plain = both(monkeypatch, few_tokens, "attend_block", lambda: attend(q, window, None, sink))
    assert_close(few, plain)
    assert batch == 1 or (few[1, 3] == 0).all()


@pytest.mark.parametrize("n_streams", [2, 4])
@pytest.mark.parametrize("tokens", [1, 8])
def test_hyper_connection_coefficients_and_step(monkeypatch, n_streams, tokens):
    streams = 3 * randn(1, tokens, n_streams, 6)
    n_rows = (2 + n_streams) * n_streams
    weights = randn(n_rows, n_streams * 6), randn(3), randn(n_rows)
    run = lambda: hyper_coefficients(streams, *weights, n_iters=20, eps=1e-6, norm_eps=1e-20)
    few, plain = both(monkeypatch, few_tokens, "coefficients", run)
    assert_close(few, plain)
    pre, post, comb, _ = plain
    y = randn(1, tokens, 6)
    run = lambda: hyper_step(streams, y, post, comb, pre)
    assert_close(*both(monkeypatch, few_tokens, "step", run))


def test_extreme_coefficients_stay_finite():
    weights = torch.full((24, 24), 1e4), torch.ones(3), torch.zeros(24)
    with torch.no_grad():
        for sign in (1, -1):
            found = hyper_coefficients(sign * torch.ones(1, 1, 4, 6), *weights, n_iters=20, eps=1e-6, norm_eps=1e-20)
            assert all(x.isfinite().all() for x in found)


def odd_rows() -> Tensor:
    """Midpoints of both grids, zeros of both signs, tiny and huge blocks, an outlier, blocks that are not finite."""
    rows = torch.randn(12, 64)
    rows[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    rows[0, 8:16] = -rows[0, :8]
    rows[1], rows[2] = 0, -0.0
    rows[3], rows[4] = 1e-30, 1e30
    rows[5, 7] = 1e4
    rows[6, 3], rows[7, 40] = torch.nan, torch.inf
    rows[8] = torch.linspace(-448, 448, 64)
    rows[9] *= 1e-3
    return rows


def same_numbers(few: Tensor, plain: Tensor) -> bool:
    """Equal in every bit, the sign of a zero included; of what is no number only that it is none."""
    number = ~plain.isnan()
    return torch.equal(few.isnan(), ~number) and torch.equal(few[number].view(torch.uint8),
                                                             plain[number].view(torch.uint8))  # fmt: skip


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cache_formats_are_the_same_in_every_bit(monkeypatch, form, dtype):
    for row in odd_rows().to(dtype).split(1):
        packed, plain = both(monkeypatch, few_codec, "to_codes", lambda row=row: form.encode(row))
        assert torch.equal(packed, plain)
        few, plain = both(monkeypatch, few_codec, "from_codes", lambda p=packed: form.decode(p, 64, dtype))
        assert same_numbers(few, plain)
        few, plain = both(monkeypatch, few_codec, "to_codes", lambda row=row: form.fake_quant(row))
        assert few.dtype == dtype and same_numbers(few, plain)


def index_case(last: int, values: int, n_heads: int = 3) -> dict:
    """Whole numbers from a small range: many scores are equal."""
    draw = lambda *shape: torch.randint(-values, values + 1, shape).double()
    return {"q": draw(1, 1, n_heads, 8), "weight": draw(1, 1, n_heads), "keys": Rows(draw(1, 40, 8)),
            "first": torch.tensor([[0]]), "last": torch.tensor([[last]])}  # fmt: skip


@pytest.mark.parametrize("last", [0, 1, 2, 7, 8, 33, 40])
@pytest.mark.parametrize("k", [1, 5, 64])
@pytest.mark.parametrize("step", [4, 16, 4096])
def test_the_index_of_one_query(monkeypatch, last, k, step):
    """Keys in one piece and in many, candidates that are thinned out on the way, blocks and the pool inside them."""
    monkeypatch.setattr(few_index, "STEP", step)
    monkeypatch.setattr(few_index, "HELD", 2 * step)
    case = index_case(last, values=1)
    counts: list[list[int]] = [[], []]
    for blocks in (0, 3, 50):
        turn = iter(counts)
        run = lambda turn=turn, blocks=blocks: score_and_select(
            **case, k=k, block_size=4, form_blocks=blocks, count=next(turn).append)
        (few, few_pool), (plain, plain_pool) = both(monkeypatch, few_index, "score_and_select", run)
        assert torch.equal(few, plain)
        assert (few_pool is None) == (plain_pool is None)
        if few_pool is not None:
            assert torch.equal(few_pool, plain_pool)
            inside = lambda pool=few_pool: score_and_select(**case, k=k, block_size=4, pool=pool)
            (few, _), (plain, _) = both(monkeypatch, few_index, "score_and_select", inside)
            assert torch.equal(few, plain)
    assert max(last, 1) * 3 == sum(counts[1])  # nothing visible still is one masked column there
    assert last * 3 == sum(counts[0])


def test_a_later_document_begins_at_its_first_entry(monkeypatch):
    case = {**index_case(30, values=2), "first": torch.tensor([[12]])}
    (few, _), (plain, _) = both(monkeypatch, few_index, "score_and_select", lambda: score_and_select(**case, k=9))
    assert torch.equal(few, plain)
    assert few[few >= 0].min() >= 12


def test_nothing_as_long_as_the_context_is_held(monkeypatch):
    """At most HELD candidates and one step of scores wait, whatever the context."""
    seen: list[int] = []
    best = few_index._best
    monkeypatch.setattr(few_index, "_best", lambda scores, k: (seen.append(scores.size), best(scores, k))[1])
    keys = Rows(torch.randn(1, 100_000, 32))
    with torch.no_grad():
        score_and_select(torch.randn(1, 1, 2, 32), torch.randn(1, 1, 2), keys, torch.tensor([[0]]),
                         torch.tensor([[100_000]]), 8, block_size=8, form_blocks=100)  # fmt: skip
    assert max(seen) <= few_index.HELD + few_index.STEP + 100


def test_a_decoded_token_is_the_same_watched_or_not():
    """Whole model: NumPy's way and PyTorch's give the same logits, counters and stores."""
    model, ids = scattered(), random_ids(1, 30)
    session = Session(model)
    session.prefill(ids)
    twin = session.fork()
    few = session.decode(7)
    with Watched():
        plain = twin.decode(7)
    assert_close(few, plain)
    assert session.fingerprint() == twin.fingerprint()
    assert session.counters.entries_scored == twin.counters.entries_scored
    assert session.counters.rows_decoded == twin.counters.rows_decoded


def test_a_flop_counter_sees_every_matrix_product_of_decode():
    """And attention besides; the tenth token fills a group, whose index key counts there as half a product."""
    session = Session(scattered())
    session.prefill(random_ids(1, 9))
    with FlopCounterMode(display=False) as counter:
        session.decode(7)
    assert counter.get_total_flops() > linear_flops(session.model.config)


def test_bfloat16_and_gradients_take_pytorchs_way(monkeypatch):
    norm = RMSNorm(12, 1e-20)
    with spied(monkeypatch, few_tokens, "norm") as calls:
        norm(torch.randn(1, 1, 12, requires_grad=True)).sum().backward()
        with torch.no_grad():
            assert norm(torch.randn(1, 1, 12).bfloat16()).dtype == torch.bfloat16
    assert not calls
