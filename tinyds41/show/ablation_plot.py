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
