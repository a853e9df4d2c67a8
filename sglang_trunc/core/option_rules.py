"""What an option may be: the rules that ``core.options`` writes down for each field, and how one is applied.

Every rule has ``documented``, for the README, where R is unknown; ``named``, which completes "must be ..." in a
refusal; and ``holds``, for values of the right type. The last two see R and the options that are settled already.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NamedTuple

LISTED_IN_FULL = 16  # numbers in a refusal


class OptionError(ValueError):
    """A value or key that cannot be used; the text is one sentence for the person who launched."""


Chosen = Mapping[str, Any]  # the options that are settled already, by name


class Between(NamedTuple):
    kind: type[int] | type[float]
    low: float
    high: float | None  # None: R

    @property
    def documented(self) -> str:
        return self._named("R" if self.high is None else f"{self.high:g}")

    def named(self, recurrences: int, chosen: Chosen) -> str:
        return self._named(f"{recurrences if self.high is None else self.high:g}")

    def _named(self, high: str) -> str:
        return f"{'an integer' if self.kind is int else 'a number'} from {self.low:g} to {high}"

    def holds(self, value: float, recurrences: int, chosen: Chosen) -> bool:
        return self.low <= value <= (recurrences if self.high is None else self.high)


class OneOf(NamedTuple):
    documented: str
    sentence: str  # template: {R} and the options before this one
    choices: Callable[[int, Chosen], Sequence[int]]  # ascending, never empty

    def named(self, recurrences: int, chosen: Chosen) -> str:
        numbers = [str(number) for number in self.choices(recurrences, chosen)]
        if len(numbers) > LISTED_IN_FULL:
            numbers = [*numbers[:3], "...", numbers[-1]]
        return f"{self.sentence.format(R=recurrences, **chosen)}: {', '.join(numbers)}"

    def holds(self, value: float, recurrences: int, chosen: Chosen) -> bool:
        return value in self.choices(recurrences, chosen)


class Named(NamedTuple):
    names: tuple[str, ...]

    @property
    def documented(self) -> str:
        return " or ".join(self.names)

    def named(self, recurrences: int, chosen: Chosen) -> str:
        return self.documented

    def holds(self, value: str, recurrences: int, chosen: Chosen) -> bool:
        return value in self.names


class Only(NamedTuple):
    """A rule that leaves one value where another option, an earlier one, has a certain value."""

    value: float
    option: str
    setting: str
    rule: Between  # elsewhere

    @property
    def documented(self) -> str:
        return f"{self.rule.documented}; only {self._named()}"

    def named(self, recurrences: int, chosen: Chosen) -> str:
        return self._named() if self._applies(chosen) else self.rule.named(recurrences, chosen)

    def holds(self, value: float, recurrences: int, chosen: Chosen) -> bool:
        return value == self.value if self._applies(chosen) else self.rule.holds(value, recurrences, chosen)

    def _named(self) -> str:
        return f"{self.value:g} where {self.option} is {self.setting}"

    def _applies(self, chosen: Chosen) -> bool:
        return bool(chosen[self.option] == self.setting)


class File(NamedTuple):
    """The path of a file that is there, or nothing."""

    kind: str  # of file, for refusals

    @property
    def documented(self) -> str:
        return f"the path of a {self.kind}, or nothing"

    def named(self, recurrences: int, chosen: Chosen) -> str:
        return self.documented

    def holds(self, value: str, recurrences: int, chosen: Chosen) -> bool:
        return not value or Path(value).is_file()


Rule = Between | OneOf | Named | Only | File


def specs_of(kind: type) -> "list[Field[Any]]":
    """An algorithm's own options, then those of all."""
    return sorted(fields(kind), key=lambda spec: spec.kw_only is True)


def checked(spec: "Field[Any]", value: Any, source: str, recurrences: int, chosen: Chosen) -> Any:
    """The value in its option's type."""
    rule = spec.metadata["rule"]
    kinds: Any = (int, float) if spec.type is float else spec.type
    if isinstance(value, bool) or not isinstance(value, kinds) or not rule.holds(value, recurrences, chosen):
        raise OptionError(f"{spec.name} is {value!r} (from {source}), but must be {rule.named(recurrences, chosen)}.")
    return spec.type(value)  # type: ignore[operator]
