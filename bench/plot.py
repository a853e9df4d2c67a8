"""A picture of predicted against measured speeds: one point an arm and cell, on the diagonal where they agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Point(NamedTuple):
    """Tokens/s of one arm in one cell of a comparison."""

    arm: str
    prompt_len: int
    concurrency: int
    predicted: float
    measured: float


def needed() -> None:
    """Raises where matplotlib is missing, before any work is done."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install -e '.[bench]'") from error


def scatter(points: Sequence[Point], path: Path) -> None:
    """Write a picture in the format that the file's name says."""
    needed()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    most = 1.1 * max(max(point.predicted, point.measured) for point in points)
    axes.plot([0, most], [0, most], color="grey", linewidth=1)
    for arm in dict.fromkeys(point.arm for point in points):
        mine = [point for point in points if point.arm == arm]
        axes.scatter([point.predicted for point in mine], [point.measured for point in mine], label=arm, s=25)
    axes.set(xlabel="predicted tokens/s", ylabel="measured tokens/s", xlim=(0, most), ylim=(0, most))
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
