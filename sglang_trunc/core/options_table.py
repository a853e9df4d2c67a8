"""The README's table of options, from what ``core.options`` says of each."""

from collections.abc import Iterator
from dataclasses import Field
from typing import Any

from sglang_trunc.core.option_rules import specs_of
from sglang_trunc.core.options import OPTIONS, Options, env_name


def options_table() -> str:
    """Markdown table of all options, for the README."""
    specs = {spec.name: spec for spec in sorted(_specs(), key=lambda spec: spec.kw_only is True)}
    lines = ["| option | environment variable | algorithms | accepted | meaning |", "|---|---|---|---|---|"]
    for name, spec in specs.items():
        owners = {algorithm: found for algorithm in OPTIONS if (found := _kinds_with(name, algorithm))}
        meaning = spec.metadata["doc"]
        lines.append(f"| `{name}` | `{env_name(name)}` | {_who(owners)} | {_accepted(name, owners)} | {meaning} |")
    return "\n".join(lines)


Owners = dict[str, list[type[Options]]]  # algorithm -> those of its classes that have an option


def _who(owners: Owners) -> str:
    """The algorithms that have an option, with the schedule where only one of an algorithm's has it."""
    if all(owners.get(algorithm) == list(kinds) for algorithm, kinds in OPTIONS.items()):
        return "all"
    whole = {algorithm: len(kinds) == len(OPTIONS[algorithm]) for algorithm, kinds in owners.items()}
    return ", ".join(name if whole[name] else _with(name, kinds[0]) for name, kinds in owners.items())


def _accepted(option: str, owners: Owners) -> str:
    """What each algorithm accepts, or one text where that is the same."""
    texts: dict[str, str] = {}
    for algorithm, kinds in owners.items():
        own = [_spec(option, kind).metadata["rule"].documented for kind in kinds]
        each = ", ".join(_with(text, kind) for text, kind in zip(own, kinds, strict=True))
        texts[algorithm] = own[0] if len(set(own)) == 1 else each
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{algorithm}: {text}" for algorithm, text in texts.items())


def _with(text: str, kind: type[Options]) -> str:
    return f"{text} with {kind.schedule}"


def _kinds_with(option: str, algorithm: str) -> list[type[Options]]:
    return [kind for kind in OPTIONS[algorithm] if option in {spec.name for spec in specs_of(kind)}]


def _spec(option: str, kind: type[Options]) -> "Field[Any]":
    return next(spec for spec in specs_of(kind) if spec.name == option)


def _specs() -> "Iterator[Field[Any]]":
    for kinds in OPTIONS.values():
        for kind in kinds:
            yield from specs_of(kind)
