"""Tasks by name, as the command line gives them."""

from __future__ import annotations

from evaluation.tasks import gsm8k, humaneval, speed
from evaluation.tasks.problem import Style, Task

NAMES = ("gsm8k", "humaneval", "humaneval+", *speed.NAMES)


def task(name: str, style: Style = Style.BASE, data: str | None = None, shots: str | None = None) -> Task:
    """``data`` and ``shots`` as the task's own module says. Raises LookupError, ValueError with a sentence."""
    if name == "gsm8k":
        return gsm8k.task(data, style, shots)
    if name in ("humaneval", "humaneval+"):
        return humaneval.task(data, style, plus=name.endswith("+"))
    if name in speed.NAMES:
        return speed.task(name, data, style)
    raise LookupError(f"{name!r} is not one of the tasks {', '.join(NAMES)}")
