"""Looking inside changes nothing: each listed name exists with its shape, and nothing else is computed."""

from __future__ import annotations

import gc
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from models import NANO, random_ids, scattered, traced, window_only
from torch.utils._python_dispatch import TorchDispatchMode

from tinyds41.config import Config
from tinyds41.plan import FULL, REINDEX, LayerPlan
from tinyds41.trace import Counters, Trace, see

PAGE = Path(__file__).parents[1] / "docs" / "trace.md"
ROW = re.compile(r"^\| `([^`]+)` \| \[([^\]]+)\] \| ([^|]+) \|", re.MULTILINE)
ROWS, LENGTH = 2, 13

CONFIGS = {
    "nano": NANO,
    # Every letter another size; ratio 3 leaves one of 13 tokens over.
    "uneven": NANO.replace(
        compress_ratios=[0, 0, 3, 3, 1, 1, 1, 1], num_attention_heads=4, index_n_heads=5, index_topk=7,
        hidden_size=24, n_routed_experts=6, num_experts_per_tok=3, hc_mult=8, q_lora_rank=10, head_dim=64),
}  # fmt: skip


def in_layer(where: str, layer: LayerPlan) -> bool:
    if where == "every":
        return True
    if where == "pool source":
        return layer.forms_pool
    if where == "Engram":
        return layer.engram is not None
    return layer.mode in where.split()


def shape_of(axes: str, config: Config, layer: LayerPlan | None) -> tuple[int, ...]:
    """The sizes behind axis letters; a letter may be a size, T=S."""
    source = None if layer is None or layer.kv_source is None else config.compress_ratios[layer.kv_source]
    entries = LENGTH // source if source else 0
    sizes = {
        "B": ROWS, "S": LENGTH, "D": config.hidden_size, "N": config.hc_mult, "H": config.num_attention_heads,
        "C": config.head_dim, "Q": config.q_lora_rank, "I": config.index_n_heads, "J": config.index_head_dim,
        "E": config.n_routed_experts, "A": config.num_experts_per_tok, "V": config.vocab_size, "T": entries,
        "K": min(config.index_topk, entries), "X": 3 * (config.engram_n_heads or 0), "T=S": LENGTH,
        "P": min(config.candidate_topk_blocks, -(-entries // config.candidate_block_size)),
    }  # fmt: skip
    return tuple(sizes[axis] for axis in axes.split(","))


def listed(config: Config) -> dict[str, tuple[int, ...]]:
    """Every name of the page for every layer it names, with its shape."""
    shapes = {}
    for name, axes, where in ROW.findall(PAGE.read_text()):
        if where.strip() == "once":
            shapes[name] = shape_of(axes, config, None)
            continue
        for layer in config.plan():
            if in_layer(where.strip(), layer):
                shapes[name.replace("layers.N", f"layers.{layer.layer}")] = shape_of(axes, config, layer)
    return shapes


class Ops(TorchDispatchMode):
    """Counts what is computed, and the largest result."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names[str(func)] += 1
        self.elements += sum(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x))
        return out


def ops_of(model, ids, trace: Trace | None) -> Ops:
    with Ops() as seen:
        model(ids, trace=trace)
    return seen


@pytest.fixture(scope="module")
def model():
    return scattered()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_page_lists_every_name_with_its_shape(name):
    config = CONFIGS[name]
    trace = traced(scattered(config), random_ids(ROWS, LENGTH))
    found = {name: tuple(tensor.shape) for name, tensor in trace.items()}
    assert found == listed(config)
    assert len(found) > 100


def test_the_page_knows_the_kinds_of_layers_that_there_are():
    wheres = {where.strip() for _, _, where in ROW.findall(PAGE.read_text())}
    assert wheres == {"once", "every", "Engram", "pool source", FULL, f"{FULL} {REINDEX}"}


def test_without_a_trace_nothing_is_computed_for_one(model):
    """The same operations with a narrow trace as without, but for the detaching of what is kept."""
    ids = random_ids(1, LENGTH)
    bare = ops_of(model, ids, None)
    names = ("layers.3.streams", "layers.4.indexer.selection", "layers.4.indexer.keys", "logits")
    narrow = ops_of(model, ids, Trace(*names))
    assert narrow.names - bare.names == Counter({"aten.detach.default": len(names)})
    assert not bare.names - narrow.names


def test_scores_are_computed_only_when_asked_for(model):
    """[B,S,T] of layer 4 exists beside the run's own chunks when its name is asked for, else not."""
    ids = random_ids(1, LENGTH)
    bare, asked = ops_of(model, ids, None), ops_of(model, ids, Trace("layers.4.indexer.scores"))
    others = ops_of(model, ids, Trace("layers.4.indexer.weights"))
    assert asked.elements > bare.elements + LENGTH * LENGTH
    # Detaching is a view: its elements count here once more, and nothing beside.
    assert others.elements == bare.elements + LENGTH * NANO.index_n_heads


def test_only_what_was_asked_for_outlives_the_run(model):
    ids = random_ids(1, LENGTH)

    def live_after(trace: Trace | None) -> int:
        with torch.no_grad():
            logits = model(ids, trace=trace)
        gc.collect()
        count = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
        del logits
        return count

    before = live_after(None)
    assert live_after(None) == before
    assert live_after(Trace("layers.3.streams", "layers.6.ffn.scores")) == before + 2


def test_a_trace_changes_no_result(model):
    ids = random_ids(ROWS, LENGTH)
    with torch.no_grad():
        plain = model(ids)
    assert torch.equal(traced(model, ids)["logits"], plain)


def test_queries_keep_their_positions_of_values_with_a_query_axis(model):
    ids, everything = random_ids(ROWS, LENGTH), Trace("*")
    some = Trace("*", queries=[5, 3])
    with torch.no_grad():
        model(ids, trace=everything)
        model(ids, trace=some)
    assert some.keys() == everything.keys()
    shapes = {name: axes for name, axes, _ in ROW.findall(PAGE.read_text())}
    for name, value in everything.items():
        by_query = shapes[re.sub(r"layers\.\d+", "layers.N", name)].startswith("B,S")
        assert torch.equal(some[name], value[:, [5, 3]] if by_query else value), name


def test_values_are_detached_unless_the_graph_is_asked_for(model):
    ids = random_ids(1, 5)
    cut, kept = Trace("layers.3.streams"), Trace("layers.3.streams", detach=False)
    model(ids, trace=cut)
    model(ids, trace=kept).sum().backward()
    assert not cut["layers.3.streams"].requires_grad
    assert kept["layers.3.streams"].grad_fn is not None
    model.zero_grad()


def test_a_pattern_without_a_match_is_an_error_that_names_neighbours(model):
    with pytest.raises(KeyError, match=r"'layers\.4\.indexer\.score'; close names are .*layers\.4\.indexer\.scores"):
        model(random_ids(1, 5), trace=Trace("layers.4.indexer.score"))
    with pytest.raises(KeyError, match=r"no intermediate is called 'layers\.99\.\*'"):
        model(random_ids(1, 5), trace=Trace("logits", "layers.99.*"))


def test_a_name_that_was_not_kept_is_an_error():
    trace = Trace("a.*")
    see(trace, "a.b", torch.zeros(1, 2))
    with pytest.raises(KeyError, match=r"'a\.c' was not kept by Trace\('a\.\*',\); close names are a\.b"):
        trace["a.c"]
    assert dict(trace).keys() == {"a.b"}


def test_a_trace_without_patterns_is_refused():
    with pytest.raises(ValueError, match="at least one name or pattern"):
        Trace()


def test_a_value_that_is_not_wanted_is_not_evaluated():
    see(Trace("a"), "b", lambda: pytest.fail("evaluated"))
    see(None, "a", lambda: pytest.fail("evaluated"))


def test_counters_add_per_name_and_layer():
    counters = Counters()
    counters.add("tokens_run", 3, 5)
    counters.add("tokens_run", 3, 2)
    counters.add("tokens_run", 4, 1)
    assert counters.tokens_run == {3: 7, 4: 1}
    assert counters.entries_scored == {}
    with pytest.raises(AttributeError, match=r"no count is called 'entries_scord'.*entries_scored"):
        _ = counters.entries_scord
    counters.reset()
    assert counters.tokens_run == {}


@pytest.mark.parametrize("position", [-1, LENGTH])
def test_a_query_outside_the_run_is_refused(model, position):
    with pytest.raises(ValueError, match=rf"position {position}: positions are 0\.\.{LENGTH - 1}"):
        model(random_ids(1, LENGTH), trace=Trace("logits", queries=[0, position]))


@pytest.mark.parametrize("queries", [[0.5], torch.tensor([True, False]), torch.tensor([[0, 1]])])
def test_queries_that_are_no_positions_are_refused(queries):
    with pytest.raises(ValueError, match="a list of positions is needed"):
        Trace("logits", queries=queries)


def test_a_trace_forgets_the_run_before(model):
    """Else a smaller model would show the layers of a larger one."""
    trace = Trace("layers.*.streams")
    model(random_ids(1, LENGTH), trace=trace)
    scattered(window_only(1))(random_ids(1, LENGTH), trace=trace)
    assert list(trace) == ["layers.0.streams"]
    last = Trace("layers.7.streams")
    model(random_ids(1, LENGTH), trace=last)
    with pytest.raises(KeyError, match=r"no intermediate is called 'layers\.7\.streams'"):
        scattered(window_only(1))(random_ids(1, LENGTH), trace=last)
