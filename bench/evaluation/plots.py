"""Pictures of a report, as PNG files: speed by task and by concurrency, acceptance by depth, widths of ticks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plot

from evaluation.figures import Figures


def draw(found: Sequence[Figures], folder: Path) -> list[Path]:
    """Those for which there is something to show."""
    plot.needed()
    import matplotlib

    matplotlib.use("Agg")
    shown = [one for one in found if one.answers]
    made = [
        _speed_by_task(shown, folder / "speed-by-task.png"),
        _speed_by_concurrency(shown, folder / "speed-by-concurrency.png"),
        _acceptance(shown, folder / "acceptance-by-depth.png"),
        _widths(shown, folder / "widths.png"),
    ]
    return [path for path in made if path is not None]


def _axes(width: float = 7.0, columns: int = 1) -> tuple[Any, Any]:
    """Figure and its axes, one after the other."""
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, columns, figsize=(width, 4.2), squeeze=False)
    return figure, grid[0]


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return path


def _ordered(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _task(one: Figures) -> str:
    return f"{one.settings['task']}\n{one.settings['sampling']['name']}"


def _speed_by_task(found: Sequence[Figures], path: Path) -> Path | None:
    """At the lowest concurrency: there a request has the machine to itself."""
    lowest = min((one.settings["concurrency"] for one in found), default=0)
    shown = [one for one in found if one.settings["concurrency"] == lowest and one.speed.decode_tps]
    tasks, names = _ordered([_task(one) for one in shown]), _ordered([one.contestant for one in shown])
    if not shown:
        return None
    figure, [axes] = _axes(max(5.0, 1.6 * len(tasks) + 2))
    bar = 0.8 / len(names)
    for index, name in enumerate(names):
        mine = {_task(one): one.speed.decode_tps for one in shown if one.contestant == name}
        places = [tasks.index(task) + (index - (len(names) - 1) / 2) * bar for task in mine]
        axes.bar(places, list(mine.values()), bar, label=name)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set(ylabel="decode tokens/s of a request", title=f"{lowest} at a time")
    axes.legend(fontsize="small")
    return _save(figure, path)


def _speed_by_concurrency(found: Sequence[Figures], path: Path) -> Path | None:
    levels = _ordered(sorted(one.settings["concurrency"] for one in found))
    if len(levels) < 2:
        return None
    figure, [axes] = _axes()
    for task, name in _ordered([(_task(one), one.contestant) for one in found]):
        mine = [one for one in found if (_task(one), one.contestant) == (task, name) and one.speed.throughput]
        points = sorted((one.settings["concurrency"], one.speed.throughput) for one in mine)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{task} {name}".replace("\n", " "))
    axes.set(xlabel="requests at a time", ylabel="tokens/s of all requests, prefill included", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.legend(fontsize="x-small")
    return _save(figure, path)


KINDS = {"depth": "depth of the draft", "position": "place in the block"}  # pipelines, TRUNC


def acceptance(one: Figures) -> tuple[str, dict[int, float]] | None:
    """A kind of ``KINDS``, and by it the share of drafted tokens that were kept."""
    for kind in KINDS:
        drafted, accepted = (one.counters.get(f"{what}_by_{kind}", {}) for what in ("drafted", "accepted"))
        shares = {int(at): accepted.get(at, 0) / number for at, number in drafted.items() if number}
        if shares:
            return kind, shares
    return None


def _acceptance(found: Sequence[Figures], path: Path) -> Path | None:
    shown = [(one, acceptance(one)) for one in found]
    kinds = [kind for kind in KINDS if any(said and said[0] == kind for _, said in shown)]
    if not kinds:
        return None
    figure, grid = _axes(5.0 * len(kinds), len(kinds))
    for kind, axes in zip(kinds, grid, strict=True):
        for one, said in shown:
            if said and said[0] == kind:
                axes.plot(list(said[1]), list(said[1].values()), marker="o", label=_label(one))
        axes.set(xlabel=KINDS[kind], ylabel="share of drafts kept", ylim=(0, 1.02))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize="x-small")
    return _save(figure, path)


def _widths(found: Sequence[Figures], path: Path) -> Path | None:
    shown = [one for one in found if one.counters.get("ticks_by_width")]
    if not shown:
        return None
    figure, [axes] = _axes()
    for one in shown:
        widths = {int(width): ticks for width, ticks in one.counters["ticks_by_width"].items()}
        total = sum(widths.values())
        axes.plot(list(widths), [ticks / total for ticks in widths.values()], marker=".", label=_label(one))
    axes.set(xlabel="rows of a tick", ylabel="share of ticks", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="x-small")
    return _save(figure, path)


def _label(one: Figures) -> str:
    return f"{_task(one)} x{one.settings['concurrency']} {one.contestant}".replace("\n", " ")
