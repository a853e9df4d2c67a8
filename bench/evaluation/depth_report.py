"""Which depths suit a model on a data set: measured curves, a fitted envelope, and the best depths by three ways.

* closed form: LoopSpec's optimum for an envelope ``beta * depth**-alpha`` of the TV distance (algorithms section 7,
  ``bench/depths.py``); the fit is least squares in logarithms, the envelope the same slope raised until it covers
  every depth. It counts ticks, not rows, and holds for R large enough.
* simulated: every depth pair that the schedules accept, run over what the depths really said, ticks counted.
* served: contestants of the store whose depths are known, by measured ticks per token and speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import depths
import plot
import sim_cases

from evaluation.depth_figures import DepthFigures, Told, ToldText
from evaluation.figures import Figures
from evaluation.report import number, table

WIDTH, MIN_SURVIVAL, BLOCKS = 16, 0.05, (2, 3, 4, 6)
SHORTEST = 2  # tokens of a text that can be simulated


class Law(NamedTuple):
    fitted: depths.PowerLaw
    envelope: depths.PowerLaw
    closed_form: tuple[float, float]  # (d1, d2) by the envelope, real numbers
    nearest: tuple[int, int] | None  # pair that LOOPSPEC_DUAL accepts


def law(distance: Mapping[int, float], recurrences: int) -> Law | None:
    """None where no power law falls with depth."""
    fitted = depths.fit(distance)
    if fitted is None:
        return None
    covering = max(share * depth**fitted.alpha for depth, share in distance.items())
    envelope = depths.PowerLaw(fitted.alpha, covering)
    wanted = depths.closed_form(envelope, recurrences)
    return Law(fitted, envelope, wanted, depths.nearest(wanted, recurrences))


def simulated(told: Sequence[Told], recurrences: int) -> list[sim_cases.Figures]:
    """Every case, plain first; without a cost table a tick counts as one unit."""
    texts = [ToldText(one) for one in told if len(one.choices) >= SHORTEST]
    grid = sim_cases.Grid(sim_cases.SCHEDULES, (WIDTH,), BLOCKS, MIN_SURVIVAL)
    found: list[sim_cases.Figures] = []
    for case in grid.cases(recurrences, range(1, recurrences + 1)) if texts else ():
        outcome = case.run(recurrences, texts, 1)
        found.append(sim_cases.figures(case, outcome, 1, None, 0.0, found[0].speed if found else None))
    return found


def best_by_schedule(found: Sequence[sim_cases.Figures]) -> list[sim_cases.Figures]:
    schedules = dict.fromkeys(one.case.schedule for one in found)
    return [sim_cases.best([one for one in found if one.case.schedule == name]) for name in schedules]


def served(found: Sequence[Figures]) -> list[Figures]:
    """Runs whose server told its depths, the fewest ticks first."""
    known = [one for one in found if one.server.get("options") and one.ticks_per_token]
    return sorted(known, key=lambda one: one.ticks_per_token or math.inf)


def markdown(figures: DepthFigures, found: Law | None, cases: Sequence[Any], runs: Sequence[Figures], name: str) -> str:
    rows = [
        [str(depth), number(figures.agreement[depth], 4), number(figures.distance[depth], 4)]
        for depth in sorted(figures.agreement)
    ]
    parts = [
        f"# Depths of {name}",
        f"R = {figures.recurrences}; {figures.tokens} tokens of plain greedy answers, teacher-forced.",
        table(("depth", "agreement with full depth", "TV distance"), rows),
        _law(found),
        f"Fewest ticks by schedule, simulated on these texts (width {WIDTH}, one request, ticks of equal cost):",
        table(("schedule", "ticks a token", "rows a token", "x plain"), map(_case, best_by_schedule(cases))),
    ]
    if runs:
        parts += ["Served:", table(("run", "options", "ticks a token", "decode ratio"), map(_run, runs))]
    return "\n\n".join([*parts, "![depths](depths.png)"]) + "\n"


def _law(found: Law | None) -> str:
    if found is None:
        return "The TV distance does not fall like a power of depth, so there is no closed form."
    d1, d2 = found.closed_form
    pair = f"nearest accepted pair {found.nearest}" if found.nearest else "no pair is accepted at this R"
    return (
        f"TV distance fits {found.fitted.beta:.3f} * depth^-{found.fitted.alpha:.2f}, enveloped by "
        f"{found.envelope.beta:.3f} * depth^-{found.envelope.alpha:.2f}. "
        f"Closed form: d1 = {d1:.2f}, d2 = {d2:.2f}; {pair}."
    )


def _case(one: sim_cases.Figures) -> list[str]:
    return [one.case.name, number(one.ticks, 2), number(one.rows, 2), number(one.ratio, 2)]


def _run(one: Figures) -> list[str]:
    names = ("d1", "d2", "block_size", "max_width")
    options = ", ".join(f"{name} {one.server['options'][name]}" for name in names if name in one.server["options"])
    ratio = one.compared.decode_ratio if one.compared else None
    s = one.settings
    title = f"{s['task']} {s['sampling']['name']} x{s['concurrency']} {one.contestant}"
    return [title, options, number(one.ticks_per_token, 2), number(ratio, 2)]


def draw(figures: DepthFigures, found: Law | None, path: Path) -> None:
    plot.needed()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    shown = sorted(figures.distance)
    axes.plot(shown, [figures.distance[depth] for depth in shown], marker="o", label="TV distance to full depth")
    wrong = [1 - figures.agreement[depth] for depth in shown]
    axes.plot(shown, wrong, marker="s", label="share of other choices")
    if found is not None:
        for kind, line in (("fit", found.fitted), ("envelope", found.envelope)):
            label = f"{kind}: {line.beta:.3f} * depth^-{line.alpha:.2f}"
            axes.plot(shown, [line.at(depth) for depth in shown], linestyle="--", label=label)
    axes.set(xlabel="depth", ylabel="distance", xscale="log", yscale="log")
    axes.set_xticks(shown, [str(depth) for depth in shown])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def as_json(figures: DepthFigures, found: Law | None, cases: Sequence[sim_cases.Figures]) -> dict[str, Any]:
    return {
        **figures._asdict(),
        "law": found and {**found._asdict(), "fitted": found.fitted._asdict(), "envelope": found.envelope._asdict()},
        "simulated": [sim_cases.as_json(one) for one in cases],
    }
