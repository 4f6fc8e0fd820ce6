"""Counted decode work: the rows come from a running session, and equal the derived ones to the last FLOP."""

import pytest

from tinyds41.config import Config
from tinyds41.cost.counted import counted_work, narrowed, one_step
from tinyds41.cost.flops import ACCOUNTINGS, decode_cost
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model
from tinyds41.trace import Counters

NANO, FLASH = Config.preset("nano"), Config.preset("flash")
PARTS = ("linear", "attention", "index_full", "index_pool", "total")


def counted(config: Config, context: int) -> Counters:
    return one_step(Session(Model(config).requires_grad_(False)), context)


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
@pytest.mark.parametrize("context", [2, 3, 6, 13, 64, 255])
def test_counted_work_is_derived_work(context, accounting):
    """Nano has a window of 4, top-3, pools of 3 blocks of 2: these contexts fill some, none or all of them."""
    cost = decode_cost(NANO)
    work = counted_work(NANO, cost.linear, counted(NANO, context), context, accounting)
    derived = cost.at(context, accounting)
    assert {part: getattr(work, part) for part in PARTS} == {part: getattr(derived, part) for part in PARTS}
    assert (work.context, work.accounting, work.meaning) == (context, accounting, derived.meaning)
    assert work.model == "counted"


@pytest.mark.parametrize("context", [4097, 20_001])
def test_few_channels_count_the_rows_of_flash(context):
    """Half of the pool open, and all of it full; odd contexts leave a group and a block open."""
    cost = decode_cost(FLASH)
    work = counted_work(FLASH, cost.linear, counted(narrowed(FLASH), context), context)
    assert {part: getattr(work, part) for part in PARTS} == {part: getattr(cost.at(context), part) for part in PARTS}


def test_narrowing_leaves_the_plan_alone():
    narrow = narrowed(FLASH)
    assert narrow.hidden_size == 32 < FLASH.hidden_size
    sizes = ("sliding_window", "index_topk", "candidate_topk_blocks", "candidate_block_size", "max_position_embeddings")
    assert [getattr(narrow, name) for name in sizes] == [getattr(FLASH, name) for name in sizes]
    for mine, theirs in zip(narrow.plan(), FLASH.plan(), strict=True):
        rules = ("mode", "ratio", "kv_source", "index_source", "forms_pool", "pooled")
        assert [getattr(mine, rule) for rule in rules] == [getattr(theirs, rule) for rule in rules]


def test_one_step_decodes_the_last_token_of_its_context():
    session = Session(Model(NANO).requires_grad_(False))
    counters = one_step(session, 13)
    assert session.lengths == [13] and counters is session.counters
    assert set(counters.tokens_run.values()) == {1}


@pytest.mark.parametrize("context", [1, 0, -4])
def test_a_context_without_a_past_is_refused(context):
    with pytest.raises(ValueError, match=f"context={context}: one token to decode and one before it"):
        counted(NANO, context)


def test_a_session_that_holds_text_is_refused():
    session = Session(Model(NANO).requires_grad_(False))
    one_step(session, 5)
    with pytest.raises(ValueError, match=r"holds texts of \[5\] tokens"):
        one_step(session, 5)


def test_an_unknown_accounting_names_the_known():
    with pytest.raises(ValueError, match=r"'bf16'.*raw, weighted"):
        counted_work(NANO, 1.0, counted(NANO, 5), 5, "bf16")
