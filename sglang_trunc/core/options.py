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
from typing import Any, ClassVar

from sglang_trunc.core.option_rules import Between, Chosen, Named, OneOf, Only, Rule

ENV_PREFIX = "SGLANG_TRUNC_"
OVERRIDE_KEY = "trunc"

SEEDED, RESIDUAL = "seeded", "residual"  # sampling policies


class OptionError(ValueError):
    """A value or key that cannot be used; the text is one sentence for the person who launched."""


def _option(doc: str, rule: Rule, default: Callable[[int, Chosen], float]) -> Any:
    # No dataclass default: every value passes through resolve_options.
    return field(metadata={"doc": doc, "rule": rule, "default": default})


def _option_of_all(doc: str, rule: Rule, default: float | str) -> Any:
    # The default is a constant, so code that builds options may leave it out; by keyword, since these come first.
    return field(default=default, kw_only=True, metadata={"doc": doc, "rule": rule, "default": lambda r, _: default})


# Depths


def default_draft_depth(recurrences: int) -> int:
    """A quarter of the way for shallow loops; deep ones (Raven, R = 32) settle earlier."""
    return recurrences // 8 if recurrences >= 16 else max(1, recurrences // 4)


def _divisors(recurrences: int, least_cycles: int) -> list[int]:
    """Depths that divide R into at least so many cycles."""
    return [depth for depth in range(1, recurrences // least_cycles + 1) if recurrences % depth == 0]


def _largest_up_to(wanted: int, choices: Sequence[int]) -> int:
    return max(choice for choice in choices if choice <= wanted)


def _d1(rule: Rule, default: Callable[[int, Chosen], int]) -> Any:
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


# Sampling and acceptance


def _relaxed_option(rule: Between, exact: float, doc: str) -> Any:
    # The cascade accepts by coins of its own, and has no choice that a draft could take the place of.
    return _option_of_all(f"for measurement, not exact: {doc}", Only(exact, "sampling_policy", RESIDUAL, rule), exact)


# The algorithms


@dataclass(frozen=True)
class Options:
    """What all algorithms have in common."""

    algorithm: ClassVar[str]  # as SGLang spells it
    least_recurrences: ClassVar[int] = 1
    why: ClassVar[str] = ""  # a model of fewer cannot be served

    sampling_policy: str = _option_of_all(
        "how requests with a temperature draw: seeded, every depth with the position's own noise, for the plain "
        "server's text; residual, LoopSpec's cascade of independent draws, for another text of the same law",
        Named((SEEDED, RESIDUAL)),
        SEEDED,
    )
    relax_top: int = _relaxed_option(
        Between(int, 1, 64),
        1,
        "a draft is kept in place of full depth's choice where it is among so many best tokens and passes relax_tau",
    )
    relax_tau: float = _relaxed_option(
        Between(float, 0, 1),
        1.0,
        "a draft that relax_top keeps must have this share of the best token's probability; 1 keeps equal ones alone",
    )

    lookup: int = _option_of_all(
        "most tokens that are looked up in the request's own text and start beside a new lane, or a block's root; d1 "
        "screens them. 0: none",
        Between(int, 0, 64),
        0,
    )
    lookup_min_match: int = _option_of_all(
        "tokens at least that must have occurred before, in this order, for what followed them to be looked up",
        Between(int, 1, 32),
        3,
    )

    @property
    def relaxed(self) -> bool:
        """Whether drafts that full depth did not choose may be kept; the text is then not the model's own."""
        return self.relax_top != 1 or self.relax_tau != 1

    def check(self, recurrences: int) -> None:
        """Refuse values that do not fit R or each other."""
        self.check_recurrences(recurrences)
        chosen: dict[str, Any] = {}
        for spec in specs_of(type(self)):
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


def specs_of(kind: type[Options]) -> "list[Field[Any]]":
    """An algorithm's own options, then those of all."""
    return sorted(fields(kind), key=lambda spec: spec.kw_only is True)


def names_of(algorithm: str) -> list[str]:
    return [spec.name for spec in specs_of(OPTIONS[algorithm])]


def algorithms_with(option: str) -> list[str]:
    return [algorithm for algorithm in OPTIONS if option in names_of(algorithm)]


def env_name(option: str) -> str:
    return ENV_PREFIX + option.upper()


def checked(spec: "Field[Any]", value: Any, source: str, recurrences: int, chosen: Chosen) -> Any:
    """The value in its option's type."""
    rule = spec.metadata["rule"]
    kinds: Any = (int, float) if spec.type is float else spec.type
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
    own = {spec.name: spec for kind in OPTIONS.values() for spec in fields(kind) if not spec.kw_only}
    specs = own | {spec.name: spec for spec in fields(Options)}
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
