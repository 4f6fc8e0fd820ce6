"""The rule that makes drafts lossless, on distributions; what is refused; what is counted."""

from __future__ import annotations

import math

import pytest
import torch
from drafters import Given, Scripted
from models import NANO, random_ids, scattered
from sessions import SHORT
from torch import Tensor

from tinyds41.infer.draft import Draft, Sampling
from tinyds41.infer.dspark_drafter import DSparkDrafter
from tinyds41.infer.generate import generate_ids
from tinyds41.infer.session import Session
from tinyds41.infer.speculate import Speculation, Writer, accept, drafter_of
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer

N_DRAWS = 200_000
TRUNCATED = Sampling(0.8, top_k=7, top_p=0.9)


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(SHORT)


# ---- the rule ----


def chi_square(counts: Tensor, chances: Tensor) -> tuple[float, float]:
    """The statistic, and what it exceeds once in a hundred times; a count where the chance is 0 makes it endless.

    Wilson and Hilferty's cube, within 0.5 % of the table from three degrees of freedom on.
    """
    possible = chances > 0
    if counts[~possible].any():
        return math.inf, 0.0
    expected = chances[possible] * counts.sum()
    assert expected.min() >= 5, "cells too small for the statistic"
    free = int(possible.sum()) - 1
    limit = free * (1 - 2 / (9 * free) + 2.3263 * math.sqrt(2 / (9 * free))) ** 3
    return float(((counts[possible] - expected) ** 2 / expected).sum()), limit


def targets() -> Tensor:
    """What the model says, at four places. Shapes: [4,10]."""
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return torch.stack([TRUNCATED.chances(row) for row in logits])


def guesses(kind: str) -> Tensor | None:
    """What a drafter draws from at three places: truncated elsewhere than the model, not at all, or certain."""
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if kind == "certain":
        return None
    sampling = TRUNCATED if kind == "truncated" else Sampling(1.5)
    return torch.stack([sampling.chances(row) for row in logits])


@pytest.mark.parametrize("kind", ["truncated", "wide", "certain"])
def test_tokens_are_drawn_as_if_nothing_had_been_drafted(kind):
    """Of 200,000 drafts: whenever a step gives a token k, it has the model's chances there, at 1 %.

    Top-k and top-p are active: there are tokens that only the drafter, and tokens that only the model allows.
    """
    p, q, generator = targets(), guesses(kind), torch.Generator().manual_seed(1)
    if q is None:
        drafted = p[:3].argmax(-1).expand(N_DRAWS, -1)
    else:
        drafted = q.multinomial(N_DRAWS, replacement=True, generator=generator).T
        assert ((q > 0) & (p[:3] == 0)).any() and (kind == "wide" or ((q == 0) & (p[:3] > 0)).any())
    uniforms = torch.rand(N_DRAWS, 3, generator=generator, dtype=torch.float64)
    count, chances = accept(p.expand(N_DRAWS, -1, -1), None if q is None else q.expand(N_DRAWS, -1, -1), drafted,
                            uniforms)  # fmt: skip
    extra = chances.multinomial(1, generator=generator)
    text = torch.cat([drafted, extra], 1).scatter(1, count.unsqueeze(1), extra)
    for place in range(4):
        there = text[count >= place, place]
        assert len(there) > 1_000
        found, limit = chi_square(torch.bincount(there, minlength=10), p[place])
        assert found < limit, (place, found, limit)
    # As often as min(1, p/q) lets it, which is what p and q have in common.
    common = p[0].amax() if q is None else torch.minimum(p[0], q[0]).sum()
    assert (count > 0).double().mean() == pytest.approx(float(common), abs=5 * 0.5 / math.sqrt(N_DRAWS))


def test_a_token_stands_while_the_number_is_below_its_ratio():
    """p/q = .2/.4: 0.49 is below, 0.51 is not; the rest is where p exceeds q, or after all tokens p itself."""
    p = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]], dtype=torch.float64)
    q = torch.tensor([[0.4, 0.4, 0.2]], dtype=torch.float64)
    for uniform, expected, rest in ((0.49, 1, [0.1, 0.1, 0.8]), (0.51, 0, [0, 0, 0.3])):
        count, chances = accept(p, q, torch.tensor([0]), torch.tensor([uniform], dtype=torch.float64))
        assert count == expected
        torch.testing.assert_close(chances, torch.tensor(rest, dtype=torch.float64))


def test_after_the_first_that_falls_none_stands():
    """The third would, were it not for the second."""
    p = torch.tensor([[1.0, 0], [0, 1.0], [1.0, 0], [1.0, 0]], dtype=torch.float64)
    count, chances = accept(p, None, torch.tensor([0, 0, 0]), torch.full((3,), 0.5, dtype=torch.float64))
    assert count == 1 and chances.tolist() == [0, 1]


def test_what_the_model_never_says_falls_even_at_the_number_0():
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    count, chances = accept(p, None, torch.tensor([0]), torch.zeros(1, dtype=torch.float64))
    assert count == 0 and chances.tolist() == [0, 1]


def test_without_a_draft_the_next_token_is_the_models():
    p = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    count, chances = accept(p, None, torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.float64))
    assert count == 0 and torch.equal(chances, p[0])


def test_where_rounding_leaves_no_rest_the_model_decides():
    """p and q differ in the last bit alone: nowhere p exceeds q, and yet a token can fall."""
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[math.nextafter(0.5, 1), 0.5]], dtype=torch.float64)
    count, chances = accept(p, q, torch.tensor([0]), torch.tensor([math.nextafter(1, 0)], dtype=torch.float64))
    assert count == 0 and chances.tolist() == [0.5, 0.5]


def test_drafts_draw_from_other_numbers_than_what_judges_them(model):
    """Else a token would be likelier where the number that judges it is low, and the rule would not hold."""
    writer = Writer(Session(model), Sampling(), [5, 6], Given(Draft(torch.tensor([[5]]))), 1)
    drawn = [torch.rand(1, generator=generator).item() for generator in (*writer.generators, *writer.drafting)]
    assert len(set(drawn)) == 4


# ---- refusals ----


def chances_of(rows: int = 1, depth: int = 3, n_ids: int = SHORT.vocab_size) -> Tensor:
    """Equal ones. Shapes: -> [rows,depth,n_ids]."""
    return torch.full((rows, depth, n_ids), 1 / n_ids, dtype=torch.float64)


def with_chance(value: float, token: int = 5) -> Tensor:
    """Equal chances but for one token at the second place."""
    chances = chances_of()
    chances[0, 1, token] = value
    return chances


def zero_for_the_drafted() -> Tensor:
    chances = with_chance(0)
    return chances / chances.sum(-1, keepdim=True)


THREE = torch.tensor([[5, 5, 5]])


@pytest.mark.parametrize(("draft", "reason"), [
    (Draft(torch.tensor([[5, 64, 5]])), "drafted id 64: the model has the ids 0 to 63, the drafter another vocabulary"),
    (Draft(torch.tensor([[5, -1, 5]])), "drafted id -1: the model has the ids 0 to 63"),
    (Draft(torch.tensor([[5, 5]])), r"a draft of shape \(1, 2\): expected \(1, 3\)"),
    (Draft(torch.tensor([[5, 5, 5]] * 2)), r"a draft of shape \(2, 3\): expected \(1, 3\)"),
    (Draft(THREE, chances_of(n_ids=65)), r"chances of shape \(1, 3, 65\): expected \(1, 3, 64\)"),
    (Draft(THREE, chances_of(depth=2)), r"chances of shape \(1, 2, 64\): expected \(1, 3, 64\)"),
    (Draft(THREE, with_chance(-0.25)), "a chance of -0.25: 0 to 1 is needed"),
    (Draft(THREE, with_chance(math.nan)), "a chance of nan"),
    (Draft(THREE, with_chance(math.inf)), "a chance of inf"),
    (Draft(THREE, with_chance(0.25)), r"add up to 1\.234\d+ over the ids 0 to 63, not to 1"),
    (Draft(THREE, zero_for_the_drafted()), "gives 5 a chance of 0 and proposes it"),
])  # fmt: skip
def test_a_draft_that_cannot_be_is_refused_and_not_read(model, draft, reason):
    session = Session(model)
    with pytest.raises(ValueError, match=reason):
        generate_ids(session, random_ids(1, 6), max_new_tokens=9, speculate=Given(draft))
    plain = Session(model)
    generate_ids(plain, random_ids(1, 6), max_new_tokens=1)
    assert session.fingerprint() == plain.fingerprint()


def test_drafted_ids_are_whole_numbers(model):
    with pytest.raises(TypeError, match=r"drafted ids of torch.float32"):
        generate_ids(model, random_ids(1, 6), max_new_tokens=9, speculate=Given(Draft(torch.ones(1, 3))))


def test_ids_without_text_are_another_vocabulary():
    """Behind the tokenizer's the model has ids that it never writes: neither drafted nor given a chance."""
    tokenizer = Tokenizer.train([], 260)
    config = NANO.replace(vocab_size=300, engram_compressed_vocab_size=tokenizer.compressed_vocab_size)
    model = Model(config, tokenizer=tokenizer)
    for draft, reason in ((Draft(torch.tensor([[5, 5, 260]])), "drafted id 260: the model has the ids 0 to 259"),
                          (Draft(THREE, chances_of(n_ids=300)), r"add up to 0\.86\d+ over the ids 0 to 259")):
        with pytest.raises(ValueError, match=reason):
            generate_ids(model, random_ids(1, 6), max_new_tokens=9, speculate=Given(draft))
    known = torch.zeros(1, 3, 300, dtype=torch.float64)
    known[..., 5] = 1
    (row,) = generate_ids(model, random_ids(1, 6), max_new_tokens=9, speculate=Given(Draft(THREE, known)))
    assert len(row) == 9 and max(row) < 260


@pytest.mark.parametrize(("options", "error", "reason"), [
    ({"draft_tokens": 3}, ValueError, "draft_tokens=3 without speculate"),
    ({"speculate": True}, ValueError, "this model has no drafter: "),
    ({"speculate": "ngram"}, TypeError, "speculate is a str: True, False or a Drafter is needed"),
    ({"speculate": Given(Draft(THREE)), "draft_tokens": 0}, ValueError, "draft_tokens=0: this Given proposes 1 to 3"),
    ({"speculate": Given(Draft(THREE)), "draft_tokens": 4}, ValueError, "draft_tokens=4: this Given proposes 1 to 3"),
    ({"speculate": Given(Draft(THREE)), "draft_tokens": 1.5}, TypeError, "float"),
])  # fmt: skip
def test_a_drafter_that_does_not_suit_is_refused_before_the_prompt_is_read(model, options, error, reason):
    session = Session(model)
    with pytest.raises(error, match=reason):
        generate_ids(session, random_ids(1, 6), max_new_tokens=9, **options)
    assert session.lengths == []


def test_a_drafter_of_another_model_is_refused(model):
    drafter, session = Given(Draft(THREE)), Session(model)
    drafter.model = scattered(SHORT)
    with pytest.raises(ValueError, match="this Given was made for another model"):
        generate_ids(session, random_ids(1, 6), max_new_tokens=9, speculate=drafter)
    assert session.lengths == []
    drafter.model = model
    assert drafter_of(session, drafter, None) == (drafter, 3)


def test_a_model_with_a_drafter_brings_it_and_its_temperatures():
    temperatures = (0.5, 1.0, 1.5, 2.0, 2.5)
    model = scattered(NANO.replace(dspark_temperatures=temperatures), draft=True)
    drafter, depth = drafter_of(Session(model), True, None)
    assert isinstance(drafter, DSparkDrafter)
    assert (drafter.model, drafter.temperatures, depth) == (model, temperatures, 5)


# ---- counters ----


def test_drafts_are_counted_by_place():
    counts = Speculation()
    assert (counts.proposed, counts.accepted, counts.acceptance, counts.accepted_length) == (0, 0, [], 1)
    for proposed, accepted in ((2, 1), (3, 3), (3, 0), (0, 0), (1, 1)):
        counts.add(proposed, accepted)
    assert (counts.proposed_at, counts.accepted_at) == ([4, 3, 2], [3, 1, 1])
    assert (counts.proposed, counts.accepted) == (9, 5)
    assert counts.acceptance == [3 / 4, 1 / 3, 1 / 2]
    assert counts.accepted_length == 1 + 5 / 4


def test_a_drafter_that_is_there_drafts(model):
    """S4: it is asked, what it proposes is verified, and a step more or less shows in the counts."""
    ids = random_ids(1, 6)
    (answer,) = generate_ids(model, ids, max_new_tokens=13, temperature=0)
    text = [*ids[0].tolist(), *answer]
    for right, steps, proposed, accepted in ((3, 3, [3, 3, 3], [3, 3, 3]), (2, 4, [4, 4, 3], [4, 4, 0])):
        drafter, counts = Scripted([text], 3, lambda number, n=right: n), Speculation()
        found = generate_ids(model, ids, max_new_tokens=13, temperature=0, speculate=drafter, speculation=counts)
        assert found == [answer] and counts.steps == steps and drafter.asked == [3] * steps
        assert counts.proposed > 0
        assert (counts.proposed_at, counts.accepted_at) == (proposed, accepted)
    plain = Speculation()
    generate_ids(model, ids, max_new_tokens=13, speculation=plain)
    assert (plain.steps, plain.proposed, plain.accepted_length) == (12, 0, 1)
