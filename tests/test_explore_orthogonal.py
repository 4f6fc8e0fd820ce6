"""The Newton-Schulz explorer shows what Muon's iteration makes of singular values, at any number of steps."""

from functools import partial

import pytest
import torch
from plot_checks import check_plot, texts

from tinyds41.show.explore_orthogonal import explore_orthogonal, orthogonal_view
from tinyds41.train import muon

MATRIX = torch.randn(6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def drawn(**steps):
    return [list(line.get_ydata()) for line in orthogonal_view(MATRIX, **steps).get_lines()]


def test_it_draws_the_singular_values_of_muons_own_iteration():
    check_plot(partial(orthogonal_view, MATRIX, name="toy"), "toy")
    before, after = drawn()
    assert before == pytest.approx((torch.linalg.svdvals(MATRIX) / MATRIX.norm()).tolist())
    found = torch.linalg.svdvals(muon.orthogonal(MATRIX[None])[0])
    assert sorted(after) == pytest.approx(sorted(found.tolist()), abs=1e-9)


@pytest.mark.parametrize(("raising", "settling"), [(0, 0), (1, 0), (0, 2), (3, 1)])
def test_fewer_steps_are_the_first_of_one_kind_then_of_the_other(monkeypatch, raising, settling):
    [first, *_], [*_, last] = muon.COEFFICIENTS, muon.COEFFICIENTS
    monkeypatch.setattr(muon, "COEFFICIENTS", (first,) * raising + (last,) * settling)
    found = torch.linalg.svdvals(muon.orthogonal(MATRIX[None])[0])
    assert sorted(drawn(raising=raising, settling=settling)[1]) == pytest.approx(sorted(found.tolist()), abs=1e-9)
    assert f"after {raising} + {settling} steps" in texts(orthogonal_view(MATRIX, raising=raising, settling=settling))


def test_a_direction_that_is_missing_is_drawn_at_the_bottom():
    flat = torch.outer(torch.ones(3), torch.ones(4))
    before, _ = (list(line.get_ydata()) for line in orthogonal_view(flat, raising=1).get_lines())
    assert before == pytest.approx([1.0, 1e-8, 1e-8])


@pytest.mark.parametrize(("matrix", "steps", "message"), [
    (torch.ones(3), {}, r"a matrix \[rows, columns\] is needed, got \(3,\)"),
    (torch.zeros(2, 3), {}, r"a matrix of zeros \(2, 3\) has no directions"),
    (MATRIX, {"raising": 9}, r"raising=9 is outside 0\.\.8"),
    (MATRIX, {"settling": -1}, r"settling=-1 is outside 0\.\.2"),
])  # fmt: skip
def test_what_cannot_be_shown_is_refused(matrix, steps, message):
    with pytest.raises(ValueError, match=message):
        orthogonal_view(matrix, **steps)


def test_a_slider_draws_the_view_again():
    pytest.importorskip("ipywidgets")
    rows, picture, _ = explore_orthogonal(MATRIX, name="toy").children
    raising, settling = rows.children
    assert (raising.value, raising.min, raising.max, settling.value, settling.max) == (8, 0, 8, 2, 2)
    before = bytes(picture.value)
    raising.value = 1
    assert bytes(picture.value) != before
