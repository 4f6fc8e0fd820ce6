"""Each check of lesson 03 accepts what is right and refuses the mistakes that readers make."""

import pytest
import torch
from exercise_checks import three_tests

import tinyds41 as ds
from tinyds41.course.lesson_03 import DECODERS, check_later_split, check_mended, check_trapezoid, mended, wanted_rows
from tinyds41.infer.prefill_modes import decoder_tokens
from tinyds41.train.note import Note
from tinyds41.train.tasks import needle_config

FLASH = ds.Config.preset("flash")


def later(split=30, pool: int | None = 30, kv=(2, 8, 14, 30), index=(2, 8, 14, 30, 34, 38), **changes):
    ratios = [0] * 2 + [2] * (split - 2) + [1] * (40 - split) + [0] * 3
    return FLASH.replace(compress_ratios=ratios, kv_source_layer_ids=kv, index_source_layer_ids=index,
                         candidate_source_layer_id=pool, **changes)  # fmt: skip


def n_more(window, layers, n):
    return max(0, layers * (window - 1) - n)


def area(window, layers):
    return sum(1 + (window - 1) * layer for layer in range(1, layers + 1))


RIGHT = [(check_mended, n_more), (check_trapezoid, area), (check_later_split, later()),
         (check_later_split, later(index=(2, 8, 14, 20, 30)))]  # fmt: skip
WRONG = [
    (check_mended, lambda window, layers, n: layers * (window - 1) - n, "is wrong"),
    (check_mended, lambda window, layers, n: max(0, 1 + layers * (window - 1) - n), "is wrong"),
    (check_mended, lambda window, layers, n: max(0, (layers - 1) * (window - 1) - 1), "decoder on 1: 0 is wrong"),
    (check_mended, lambda window, layers, n: 92, "windows of 1, 3 layers"),
    (check_trapezoid, lambda window, layers: layers * (1 + layers * (window - 1)), "is wrong"),
    (check_trapezoid, lambda window, layers: layers * window, "is wrong"),
    (check_trapezoid, lambda window, layers: sum((window - 1) * layer for layer in range(1, layers + 1)), "is wrong"),
    (check_later_split, FLASH, "the decoder begins at layer 20"),
    (check_later_split, later(num_experts_per_tok=4), "num_experts_per_tok differs"),
    (check_later_split, later(pool=None, candidate_topk_blocks=0), "candidate_topk_blocks differs"),
    (check_later_split, later(pool=None), "forms no pool"),
    (check_later_split, later(kv=(2, 8, 14, 20, 30), index=(2, 8, 14, 20, 30), split=20), "ratios are"),
    (check_later_split, 0.75, "cannot be used: AttributeError"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip


@pytest.mark.parametrize(("window", "layers"), [(4, 2), (32, 4), (128, 20), (1, 3)])
def test_the_walk_back_ends_where_exact_prefill_begins(window, layers):
    masks = wanted_rows(window, layers)
    assert int(masks[-1].sum()) == window + (layers - 1) * (window - 1)
    assert int(masks[0].sum()) == window


@pytest.mark.parametrize(("window", "n_decoder"), [(4, 2), (3, 3)])
def test_a_bounded_prefill_is_mended_after_as_many_tokens_as_the_walk_says(window, n_decoder):
    """On a model, without rounding: the last token that differs stands just before."""
    ratios = (0, *(1,) * n_decoder)
    config = needle_config(
        Note(), num_hidden_layers=1 + n_decoder, compress_ratios=ratios, kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,), candidate_source_layer_id=None, candidate_topk_blocks=0, sliding_window=window,
        quantize_cache=False)  # fmt: skip
    model = ds.Model(config, seed=0, dtype=torch.float64)
    ids = torch.randint(4, config.vocab_size, (1, 60), generator=torch.Generator().manual_seed(0))
    logits = []
    for mode in ("full", "bounded"):
        session = ds.Session(model)
        last = session.prefill(ids[:, :40], mode=mode)
        logits.append(torch.cat([last[:, None], session.extend(ids[:, 40:])], 1))
    differ = ((logits[0] - logits[1]).abs().amax((0, 2)) > 1e-11).nonzero()
    assert decoder_tokens(config, "bounded") == window
    assert int(differ.max()) == mended(window, n_decoder, window) > 0


def test_the_decoders_asked_about_include_some_that_need_nothing():
    assert min(mended(*decoder) for decoder in DECODERS) == 0 < max(mended(*decoder) for decoder in DECODERS)
