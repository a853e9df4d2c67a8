"""Options of the speculative algorithms: which there are and what each accepts.

Each field is documented once, in its metadata; `core.options_table` renders the README's table from that. Fields of
several classes are in `core.option_fields`. Where a value comes from is `core.resolve`'s business. Whatever cannot be
used is refused with one sentence that names the field, the value, its source and what is accepted.

What an option accepts may depend on R and on the options before it in its class (d2 on d1), so these are
always checked in that order. TRUNC has two classes, of which `core.resolve.kind_of` picks one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from sglang_trunc.core import option_fields
from sglang_trunc.core.option_fields import FIXED as FIXED
from sglang_trunc.core.option_fields import MEASURED as MEASURED
from sglang_trunc.core.option_fields import RESIDUAL as RESIDUAL
from sglang_trunc.core.option_fields import SEEDED as SEEDED
from sglang_trunc.core.option_rules import Between, File, Named, OneOf, checked, specs_of
from sglang_trunc.core.option_rules import OptionError as OptionError

ENV_PREFIX = "SGLANG_TRUNC_"
OVERRIDE_KEY = "trunc"

# The algorithms


@dataclass(frozen=True)
class Options:
    """What all algorithms have in common."""

    algorithm: ClassVar[str]  # as SGLang spells it
    schedule: ClassVar[str] = ""  # tells the classes of one algorithm apart
    least_recurrences: ClassVar[int] = 1
    why: ClassVar[str] = ""  # a model of fewer cannot be served

    sampling_policy: str = option_fields.option_with(
        SEEDED,
        "how requests with a temperature draw: seeded, every depth with the position's own noise, for the plain "
        "server's text; residual, LoopSpec's cascade of independent draws, for another text of the same law",
        Named((SEEDED, RESIDUAL)),
    )
    relax_top: int = option_fields.relaxed_option(
        Between(int, 1, 64),
        1,
        "a draft is kept in place of full depth's choice where it is among so many best tokens and passes relax_tau",
    )
    relax_tau: float = option_fields.relaxed_option(
        Between(float, 0, 1),
        1.0,
        "a draft that relax_top keeps must have this share of the best token's probability; 1 keeps equal ones alone",
    )

    lookup: int = option_fields.lookup(0)
    lookup_min_match: int = option_fields.option_with(
        3,
        "tokens at least that must have occurred before, in this order, for what followed them to be looked up",
        Between(int, 1, 32),
    )
    lookup_corpus: str = option_fields.option_with(
        "",
        'documents that every request looks up in beside its own text: JSON Lines, each of them {"tokens": [...]} or '
        '{"text": "..."}',
        File("JSON Lines file"),
    )
    screen_top: int = option_fields.option_with(
        1,
        "a looked-up token goes on beyond d1 only if it is among so many of d1's best; 1: only if d1 chooses it; "
        "0: always",
        Between(int, 0, 64),
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
            who = f"{cls.algorithm} with {cls.schedule}" if cls.schedule else cls.algorithm
            raise OptionError(f"R is {recurrences}, but {who} needs at least {cls.least_recurrences}: {cls.why}.")


@dataclass(frozen=True)
class TruncOptions(Options):
    """TRUNC as it was published: blocks of one size."""

    algorithm: ClassVar[str] = "TRUNC"
    schedule: ClassVar[str] = "blocks"

    d1: int = option_fields.d1(Between(int, 1, None), lambda r, _: option_fields.default_draft_depth(r))
    block_size: int = option_fields.option(
        "tokens verified together in a round, the bonus token included; 1 is plain decoding",
        Between(int, 1, 64),
        lambda r, _: 4,
    )
    draft_threshold: float = option_fields.option(
        "drafting of a block stops when the draft's probability at d1 falls below this; 0 never stops it",
        Between(float, 0, 1),
        lambda r, _: 0.0,
    )


@dataclass(frozen=True)
class SingleOptions(Options):
    algorithm: ClassVar[str] = "LOOPSPEC_SINGLE"
    least_recurrences: ClassVar[int] = 2
    why: ClassVar[str] = "a looped model with one recurrence has no early depth"

    d1: int = option_fields.pipelined_d1("a divisor of R below it", "a divisor of R = {R} below it", 2)
    max_width: int = option_fields.max_width()
    min_survival: float = option_fields.min_survival()
    control: str = option_fields.control(FIXED)
    lookup_candidates: int = option_fields.lookup_candidates()


@dataclass(frozen=True)
class DualOptions(Options):
    algorithm: ClassVar[str] = "LOOPSPEC_DUAL"
    least_recurrences: ClassVar[int] = 3
    why: ClassVar[str] = "d2 must be a multiple of d1 between d1 and R, which for R = 3 are d1 = 1 and d2 = 2"

    # R / 2 divides R, too, but leaves no multiple of itself for d2.
    d1: int = option_fields.pipelined_d1(
        "a divisor of R below R / 2", "a divisor of R = {R} below R / 2, so that d2 fits between d1 and R", 3
    )
    d2: int = option_fields.d2(
        OneOf(
            "a multiple of d1 between d1 and R",
            "a multiple of d1 = {d1} between d1 and R = {R}",
            option_fields.second_depths,
        ),
        option_fields.default_d2,
    )
    max_width: int = option_fields.max_width()
    min_survival: float = option_fields.min_survival()
    control: str = option_fields.control(FIXED)
    lookup_candidates: int = option_fields.lookup_candidates()


@dataclass(frozen=True)
class ControlledOptions(Options):
    """TRUNC unless a block is asked for: lanes and lookups by what they are worth, down to plain decoding."""

    algorithm: ClassVar[str] = "TRUNC"
    schedule: ClassVar[str] = "lanes"
    least_recurrences: ClassVar[int] = 2
    why: ClassVar[str] = (
        "with one there is no early depth, and d2, max_width, min_survival, control and lookup_candidates are for lanes"
    )

    # Blocks take any depth, and a d1 that was chosen for them may come without its block size.
    d1: int = option_fields.pipelined_d1(
        "a divisor of R below it", "a divisor of R = {R} below it where no block_size is set", 2
    )
    d2: int = option_fields.d2(
        OneOf(
            "a multiple of d1 between d1 and R, or 0 for none",
            "a multiple of d1 = {d1} between d1 and R = {R}, or 0 for none",
            lambda r, chosen: [0, *option_fields.second_depths(r, chosen)],
        ),
        lambda r, chosen: option_fields.default_d2(r, chosen) if option_fields.second_depths(r, chosen) else 0,
    )
    max_width: int = option_fields.max_width(32)
    min_survival: float = option_fields.min_survival()
    control: str = option_fields.control(MEASURED)
    lookup_candidates: int = option_fields.lookup_candidates()
    lookup: int = option_fields.lookup(8)


# Of each algorithm; the first is used that has all options that were set, and that R suffices for (resolve.kind_of).
OPTIONS: Mapping[str, tuple[type[Options], ...]] = MappingProxyType(
    {"TRUNC": (ControlledOptions, TruncOptions), "LOOPSPEC_SINGLE": (SingleOptions,), "LOOPSPEC_DUAL": (DualOptions,)}
)


# Names and values


def names_of(algorithm: str) -> list[str]:
    """Options of all classes of the algorithm."""
    own = [spec for kind in OPTIONS[algorithm] for spec in specs_of(kind)]
    return list(dict.fromkeys(spec.name for spec in sorted(own, key=lambda spec: spec.kw_only is True)))


def algorithms_with(option: str) -> list[str]:
    return [algorithm for algorithm in OPTIONS if option in names_of(algorithm)]


def env_name(option: str) -> str:
    return ENV_PREFIX + option.upper()


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
