"""Options of the speculative algorithms: which there are and what each accepts.

Each field is documented once, in its metadata; `options_table` renders the README's table from that. Where a
value comes from is `core.resolve`'s business. Whatever cannot be used is refused with one sentence that names
the field, the value, its source and what is accepted.

What an option accepts may depend on R and on the options before it in its class (d2 on d1), so these are
always checked in that order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

ENV_PREFIX = "SGLANG_TRUNC_"
OVERRIDE_KEY = "trunc"
LISTED_IN_FULL = 16  # numbers in a refusal

Chosen = Mapping[str, Any]  # the options that are settled already, by name


class OptionError(ValueError):
    """A value or key that cannot be used; the text is one sentence for the person who launched."""


# What an option may be. `documented` is for the README, where R is unknown; `named` completes "must be ...".


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


def _option(doc: str, rule: Between | OneOf, default: Callable[[int, Chosen], float]) -> Any:
    # No dataclass default: every value passes through resolve_options.
    return field(metadata={"doc": doc, "rule": rule, "default": default})


# Depths


def default_draft_depth(recurrences: int) -> int:
    """A quarter of the way for shallow loops; deep ones (Raven, R = 32) settle earlier."""
    return recurrences // 8 if recurrences >= 16 else max(1, recurrences // 4)


def _divisors(recurrences: int, least_cycles: int) -> list[int]:
    """Depths that divide R into at least so many cycles."""
    return [depth for depth in range(1, recurrences // least_cycles + 1) if recurrences % depth == 0]


def _largest_up_to(wanted: int, choices: Sequence[int]) -> int:
    return max(choice for choice in choices if choice <= wanted)


def _d1(rule: Between | OneOf, default: Callable[[int, Chosen], int]) -> Any:
    return _option("depth (recurrences done) at which drafts are read out", rule, default)


def _pipelined_d1(documented: str, sentence: str, least_cycles: int) -> Any:
    return _d1(
        OneOf(documented, sentence, lambda r, _: _divisors(r, least_cycles)),
        lambda r, _: _largest_up_to(default_draft_depth(r), _divisors(r, least_cycles)),
    )


def _second_depths(recurrences: int, chosen: Chosen) -> Sequence[int]:
    return range(2 * chosen["d1"], recurrences, chosen["d1"])


def _default_d2(recurrences: int, chosen: Chosen) -> int:
    wanted = chosen["d1"] * (2 if recurrences < 16 else 4)
    return _largest_up_to(wanted, _second_depths(recurrences, chosen))


# The algorithms


@dataclass(frozen=True)
class Options:
    """What all algorithms have in common."""

    algorithm: ClassVar[str]  # as SGLang spells it
    least_recurrences: ClassVar[int] = 1
    why: ClassVar[str] = ""  # a model of fewer cannot be served

    def check(self, recurrences: int) -> None:
        """Refuse values that do not fit R or each other."""
        self.check_recurrences(recurrences)
        chosen: dict[str, Any] = {}
        for spec in fields(self):
            chosen[spec.name] = checked(spec, getattr(self, spec.name), "the caller", recurrences, chosen)

    @classmethod
    def check_recurrences(cls, recurrences: int) -> None:
        if recurrences < cls.least_recurrences:
            raise OptionError(
                f"R is {recurrences}, but {cls.algorithm} needs at least {cls.least_recurrences}: {cls.why}."
            )


@dataclass(frozen=True)
class TruncOptions(Options):
    algorithm: ClassVar[str] = "TRUNC"

    d1: int = _d1(Between(int, 1, None), lambda r, _: default_draft_depth(r))
    block_size: int = _option(
        "tokens verified together in a round, the bonus token included; 1 is plain decoding",
        Between(int, 1, 64),
        lambda r, _: 4,
    )
    draft_threshold: float = _option(
        "drafting of a block stops when the draft's probability at d1 falls below this; 0 never stops it",
        Between(float, 0, 1),
        lambda r, _: 0.0,
    )


def _max_width() -> Any:
    return _option(
        "rows of one tick, all requests together; the tree is cut to it, every request keeps at least its oldest lane",
        Between(int, 1, 256),
        lambda r, _: 16,
    )


def _min_survival() -> Any:
    return _option(
        "a lane whose estimated chance to be kept is below this is not started, or dropped",
        Between(float, 0, 1),
        lambda r, _: 0.02,
    )


@dataclass(frozen=True)
class SingleOptions(Options):
    algorithm: ClassVar[str] = "LOOPSPEC_SINGLE"
    least_recurrences: ClassVar[int] = 2
    why: ClassVar[str] = "a looped model with one recurrence has no early depth"

    d1: int = _pipelined_d1("a divisor of R below it", "a divisor of R = {R} below it", 2)
    max_width: int = _max_width()
    min_survival: float = _min_survival()


@dataclass(frozen=True)
class DualOptions(Options):
    algorithm: ClassVar[str] = "LOOPSPEC_DUAL"
    least_recurrences: ClassVar[int] = 3
    why: ClassVar[str] = "d2 must be a multiple of d1 between d1 and R, which for R = 3 are d1 = 1 and d2 = 2"

    # R / 2 divides R, too, but leaves no multiple of itself for d2.
    d1: int = _pipelined_d1(
        "a divisor of R below R / 2", "a divisor of R = {R} below R / 2, so that d2 fits between d1 and R", 3
    )
    d2: int = _option(
        "second depth at which drafts are read out, where they are confirmed or contested",
        OneOf("a multiple of d1 between d1 and R", "a multiple of d1 = {d1} between d1 and R = {R}", _second_depths),
        _default_d2,
    )
    max_width: int = _max_width()
    min_survival: float = _min_survival()


OPTIONS: Mapping[str, type[Options]] = MappingProxyType(
    {kind.algorithm: kind for kind in (TruncOptions, SingleOptions, DualOptions)}
)


# Names and values


def names_of(algorithm: str) -> list[str]:
    return [spec.name for spec in fields(OPTIONS[algorithm])]


def algorithms_with(option: str) -> list[str]:
    return [algorithm for algorithm in OPTIONS if option in names_of(algorithm)]


def env_name(option: str) -> str:
    return ENV_PREFIX + option.upper()


def checked(spec: "Field[Any]", value: Any, source: str, recurrences: int, chosen: Chosen) -> Any:
    """The value in its option's type."""
    rule = spec.metadata["rule"]
    kinds = (int,) if spec.type is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not rule.holds(value, recurrences, chosen):
        raise OptionError(f"{spec.name} is {value!r} (from {source}), but must be {rule.named(recurrences, chosen)}.")
    return spec.type(value)  # type: ignore[operator]


def checked_keys(algorithm: str, values: object, where: str) -> Mapping[str, Any]:
    """An object all of whose keys are options of the algorithm."""
    values, known = as_object(values, where), names_of(algorithm)
    for key in values:
        if key in known:
            continue
        if algorithms_with(key):
            raise not_an_option(key, algorithm, where)
        raise OptionError(f"{key} is not an option ({where}), the options are {', '.join(known)}.")
    return values


def not_an_option(option: str, algorithm: str, where: str) -> OptionError:
    """It belongs to another algorithm."""
    return OptionError(
        f"{option} is not an option of {algorithm} ({where}); its options are {', '.join(names_of(algorithm))}."
    )


def as_object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise OptionError(f"{where} is {value!r}, but must be an object.")
    return value


# Documentation


def options_table() -> str:
    """Markdown table of all options, for the README."""
    specs = {spec.name: spec for kind in OPTIONS.values() for spec in fields(kind)}
    lines = ["| option | environment variable | algorithms | accepted | meaning |", "|---|---|---|---|---|"]
    for name, spec in specs.items():
        algorithms = algorithms_with(name)
        who = "all" if len(algorithms) == len(OPTIONS) else ", ".join(algorithms)
        lines.append(f"| `{name}` | `{env_name(name)}` | {who} | {_accepted(name)} | {spec.metadata['doc']} |")
    return "\n".join(lines)


def _accepted(option: str) -> str:
    """What each algorithm accepts, or one text where that is the same."""
    texts: dict[str, str] = {
        kind.algorithm: spec.metadata["rule"].documented
        for kind in OPTIONS.values()
        for spec in fields(kind)
        if spec.name == option
    }
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{algorithm}: {text}" for algorithm, text in texts.items())
