"""Checks of single config fields; each raises one sentence with the field, the value and what is accepted.

`configs` runs them on every assignment, so that a value from config.json and one from
``--json-model-override-args`` meet the same rule.
"""

import math
from collections.abc import Callable
from typing import Any

FieldCheck = Callable[[str, Any], None]


def at_least(lowest: int) -> FieldCheck:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ValueError(f"{name} is {value!r}, but must be an integer from {lowest} up.")

    return check


def one_of(*accepted: Any) -> FieldCheck:
    def check(name: str, value: Any) -> None:
        if value not in accepted:
            choices = ", ".join("null" if item is None else repr(item) for item in accepted)
            raise ValueError(f"{name} is {value!r}, but only {choices} can be served.")

    return check


def not_below_zero(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}, but must be a finite number from 0 up.")


def last_step_only(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and value >= 1):
        raise ValueError(
            f"{name} is {value!r}, but every token is read from the last recurrence, so that only 1 or more "
            f"(or null) is accepted; set total_ut_steps to serve fewer recurrences."
        )
