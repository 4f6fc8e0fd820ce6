"""What teaches a drafter: blocks inside documents, three losses, who gets a gradient."""

from __future__ import annotations

import math

import pytest
import torch

from tinyds41.train.draft_loss import choose_anchors, draft_loss, position_weights


def logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


def by_hand(draft, target, tokens, confidence) -> tuple[float, float, float, list[list[float]], float]:
    """Plain Python: ce, tv, confidence, acceptance, accepted length."""
    n, k = len(tokens), len(tokens[0])
    weights = [math.exp(-i / k) for i in range(k)]
    weights = [w / sum(weights) for w in weights]
    ce = tv = bce = length = 0.0
    acceptance = []
    for b in range(n):
        survival, row = 1.0, []
        for i in range(k):
            q, p = softmax(draft[b][i]), softmax(target[b][i])
            distance = sum(abs(x - y) for x, y in zip(q, p, strict=True)) / 2
            c = 1 / (1 + math.exp(-confidence[b][i]))
            ce += weights[i] * -math.log(q[tokens[b][i]]) / n
            tv += weights[i] * distance / n
            bce += weights[i] * -((1 - distance) * math.log(c) + distance * math.log(1 - c)) / n
            survival *= 1 - distance
            length += survival / n
            row.append(1 - distance)
        acceptance.append(row)
    return ce, tv, bce, acceptance, 1 + length


def test_the_losses_are_those_of_the_formula():
    draft, target, confidence = logits(1, 3, 4, 6), logits(2, 3, 4, 6), logits(3, 3, 4)
    tokens = torch.tensor([[0, 1, 2, 3], [5, 4, 3, 2], [1, 1, 0, 5]])
    ce, tv, bce, acceptance, length = by_hand(*(x.tolist() for x in (draft, target, tokens, confidence)))
    found = draft_loss(draft, target, tokens, confidence)
    for value, expected in ((found.ce, ce), (found.tv, tv), (found.confidence, bce)):
        assert value.item() == pytest.approx(expected, rel=1e-12)
    assert found.total.item() == pytest.approx(0.1 * ce + 0.9 * tv + bce, rel=1e-12)
    assert torch.allclose(found.acceptance, torch.tensor(acceptance, dtype=torch.float64), atol=1e-14)
    assert found.accepted_length == pytest.approx(length, rel=1e-12)


def test_gradients_reach_the_draft_and_its_confidence_alone():
    draft, target, confidence = logits(1, 2, 3, 6), logits(2, 2, 3, 6), logits(3, 2, 3)
    found = draft_loss(draft, target, torch.zeros(2, 3, dtype=torch.long), confidence)
    found.confidence.backward(retain_graph=True)
    assert draft.grad is None and target.grad is None and confidence.grad is not None
    found.total.backward()
    assert draft.grad is not None and bool(draft.grad.any()) and target.grad is None


def test_earlier_positions_weigh_more():
    weights = position_weights(5, torch.float64, torch.device("cpu"))
    assert float(weights.sum()) == pytest.approx(1)
    assert (weights[1:] / weights[:-1]).tolist() == pytest.approx([math.exp(-1 / 5)] * 4)


def test_a_draft_equal_to_its_target_always_stands():
    draft = logits(1, 2, 3, 6)
    found = draft_loss(draft, draft, torch.zeros(2, 3, dtype=torch.long), logits(3, 2, 3))
    assert found.accepted_length == 4 and found.tv.item() == 0


def test_blocks_lie_inside_documents():
    """Trap T1: every anchor whose block lies in one document, and no other."""
    documents = torch.tensor([[0] * 4 + [1] * 8, [3] * 2 + [7] * 5 + [-1] * 5])
    rows, tokens = choose_anchors(documents * 0, documents, 99, 3, torch.Generator().manual_seed(0))
    expected = [(0, 0), *((0, token) for token in range(4, 9)), (1, 2), (1, 3)]
    assert sorted(zip(rows.tolist(), tokens.tolist(), strict=True)) == expected


def test_the_same_id_again_is_another_document():
    documents = torch.tensor([[0, 0, 1, 0, 0, 0]])
    rows, tokens = choose_anchors(documents, documents, 9, 2, torch.Generator())
    assert list(zip(rows.tolist(), tokens.tolist(), strict=True)) == [(0, 3)]


def test_anchors_are_drawn_without_repeating_any():
    ids = torch.zeros(4, 20, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        rows, tokens = choose_anchors(ids, None, 6, 5, generator)
        places = set(zip(rows.tolist(), tokens.tolist(), strict=True))
        assert len(places) == 6
        seen |= places
    assert seen == {(b, t) for b in range(4) for t in range(15)}


@pytest.mark.parametrize(("ids", "documents"), [
    (torch.zeros(1, 5, dtype=torch.long), None),
    (torch.zeros(1, 6, dtype=torch.long), torch.tensor([[0, 0, 0, 1, 1, 1]])),
    (torch.zeros(1, 6, dtype=torch.long), torch.full((1, 6), -1)),
])  # fmt: skip
def test_texts_too_short_for_a_block_are_refused(ids, documents):
    with pytest.raises(ValueError, match=r"no document of \(1, \d\) ids has 6 tokens"):
        choose_anchors(ids, documents, 4, 5, torch.Generator())


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"draft \(2, 3, 6\), target \(2, 3, 5\)"):
        draft_loss(logits(1, 2, 3, 6), logits(2, 2, 3, 5), torch.zeros(2, 3, dtype=torch.long), logits(3, 2, 3))
