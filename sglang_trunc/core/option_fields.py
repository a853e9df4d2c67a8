"""Fields of ``core.options`` that several of its classes have: sentence for the README, rule and default of each.

All three lie in the field's metadata; rules are ``core.option_rules``'.
"""

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from sglang_trunc.core.option_rules import Between, Chosen, Named, OneOf, Only, Rule

SEEDED, RESIDUAL = "seeded", "residual"  # sampling policies
MEASURED, FIXED = "measured", "fixed"  # control


def option(doc: str, rule: Rule, default: Callable[[int, Chosen], float]) -> Any:
    # No dataclass default: every value passes through resolve_options.
    return field(metadata={"doc": doc, "rule": rule, "default": default})


def option_with(default: float | str, doc: str, rule: Rule) -> Any:
    # The default is a constant, so code that builds options may leave it out; by keyword, since these come first.
    return field(default=default, kw_only=True, metadata={"doc": doc, "rule": rule, "default": lambda r, _: default})


# Depths


def default_draft_depth(recurrences: int) -> int:
    """A quarter of the way for shallow loops; deep ones (Raven, R = 32) settle earlier."""
    return recurrences // 8 if recurrences >= 16 else max(1, recurrences // 4)


def divisors(recurrences: int, least_cycles: int) -> list[int]:
    """Depths that divide R into at least so many cycles."""
    return [depth for depth in range(1, recurrences // least_cycles + 1) if recurrences % depth == 0]


def _largest_up_to(wanted: int, choices: Sequence[int]) -> int:
    return max(choice for choice in choices if choice <= wanted)


def d1(rule: Rule, default: Callable[[int, Chosen], int]) -> Any:
    return option("depth (recurrences done) at which drafts are read out", rule, default)


def pipelined_d1(documented: str, sentence: str, least_cycles: int) -> Any:
    return d1(
        OneOf(documented, sentence, lambda r, _: divisors(r, least_cycles)),
        lambda r, _: _largest_up_to(default_draft_depth(r), divisors(r, least_cycles)),
    )


def second_depths(recurrences: int, chosen: Chosen) -> Sequence[int]:
    return range(2 * chosen["d1"], recurrences, chosen["d1"])


def d2(rule: Rule, default: Callable[[int, Chosen], int]) -> Any:
    return option("second depth at which drafts are read out, where they are confirmed or contested", rule, default)


def default_d2(recurrences: int, chosen: Chosen) -> int:
    wanted = chosen["d1"] * (2 if recurrences < 16 else 4)
    return _largest_up_to(wanted, second_depths(recurrences, chosen))


# Sampling and acceptance


def relaxed_option(rule: Between, exact: float, doc: str) -> Any:
    # The cascade accepts by coins of its own, and has no choice that a draft could take the place of.
    return option_with(exact, f"for measurement, not exact: {doc}", Only(exact, "sampling_policy", RESIDUAL, rule))


# Lookups and control


def lookup(default: int) -> Any:
    return option_with(
        default,
        "most tokens that are looked up in the request's own text and start beside a new lane, or a block's root; d1 "
        "screens them. 0: none",
        Between(int, 0, 64),
    )


def lookup_candidates() -> Any:
    return option_with(
        1,
        "continuations that the looked-up tokens beside one lane are taken from, as one small tree",
        Between(int, 1, 8),
    )


def control(default: str) -> Any:
    return option_with(
        default,
        "who decides how many rows a tick has and how many looked-up tokens start: measured, what a row costs on this "
        "machine and what proposals have been worth; fixed, max_width and lookup alone",
        Named((MEASURED, FIXED)),
    )


def max_width(default: int = 16) -> Any:
    return option(
        "rows of one tick, all requests together; the tree is cut to it, every request keeps at least its oldest lane",
        Between(int, 1, 256),
        lambda r, _: default,
    )


def min_survival() -> Any:
    return option(
        "a lane whose estimated chance to be kept is below this is not started, or dropped",
        Between(float, 0, 1),
        lambda r, _: 0.02,
    )
