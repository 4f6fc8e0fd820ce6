"""What each variant of an ablation reached: every seed as a point, their mean as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from tinyds41.show.style import Style, new_axes, require_data, require_numbers, styled


@styled
def plot_ablation(
    style: Style, values: Mapping[str, Sequence[float]], *, quantity: str, title: str, ax: Axes | None = None
) -> Axes:
    """A row per variant, first on top: a ring for each seed, a line at the mean, labelled with mean and spread.

    values: by variant, one per seed. quantity: what they are, with its unit. The spread is the sample's standard
    deviation; of one seed none is shown.
    Raises: ValueError for no variant, one without values, or a value that is no finite number.
    """
    require_data(values, "variants")
    for name, numbers in values.items():
        require_data(numbers, f"values of {name}")
        require_numbers((f"{name}, seed {seed}", value) for seed, value in enumerate(numbers))
    ax = ax or new_axes(style)
    for row, numbers in enumerate(values.values()):
        mean = sum(numbers) / len(numbers)
        ax.plot(numbers, [row] * len(numbers), linestyle="", marker="o", color=style.palette.blue,
                markerfacecolor="none", markersize=style.font / 1.6)  # fmt: skip
        ax.plot([mean, mean], [row - 0.28, row + 0.28], color=style.palette.orange)
        spread = (sum((value - mean) ** 2 for value in numbers) / max(1, len(numbers) - 1)) ** 0.5
        shown = f"{mean:.3g} ± {spread:.1g}" if len(numbers) > 1 else f"{mean:.3g}"
        ax.annotate(shown, (mean, row - 0.28), xytext=(0, 0.25 * style.font), textcoords="offset points", ha="center",
                    va="bottom", color=style.palette.orange)  # fmt: skip
    ax.set_yticks(range(len(values)), list(values))
    ax.set(xlabel=quantity, ylim=(len(values) - 0.4, -0.8))
    ax.margins(x=0.15)
    ax.set_title(title)
    return ax


@styled
def plot_right_by_mass(
    style: Style, points: Mapping[str, Sequence[tuple[float, float]]], *, quantity: str, title: str,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Right answers against the attention mass that was kept: a ring for each seed, the variant's name at their mean.

    points: by variant, (mass, right) of each seed, shares. quantity: whose mass it is.
    Raises: ValueError for no variant, one without points, or a number that is not finite.
    """
    require_data(points, "variants")
    ax = ax or new_axes(style)
    means = {}
    for name, pairs in points.items():
        require_data(pairs, f"points of {name}")
        require_numbers((f"{name}, seed {seed}", value) for seed, pair in enumerate(pairs) for value in pair)
        masses, right = zip(*pairs, strict=True)
        ax.plot(masses, right, linestyle="", marker="o", color=style.palette.blue, markerfacecolor="none",
                markersize=style.font / 1.6)  # fmt: skip
        means[name] = (sum(masses) / len(pairs), sum(right) / len(pairs))
    ax.plot(*zip(*means.values(), strict=True), color=style.palette.orange, marker="s", markersize=style.font / 2.2)
    ax.margins(x=0.2, y=0.2)
    boxed = {"facecolor": style.palette.paper, "edgecolor": "none", "pad": 1}  # readable where the line passes behind
    for i, (name, place) in enumerate(means.items()):
        below = (-1) ** i  # neighbours stand on different sides of the line
        ax.annotate(name, place, xytext=(0, below * 1.1 * style.font), textcoords="offset points", ha="center",
                    va="bottom" if below > 0 else "top", color=style.palette.orange, bbox=boxed)  # fmt: skip
    ax.set(xlabel=quantity, ylabel="right answers, share")
    ax.set_title(title)
    return ax
