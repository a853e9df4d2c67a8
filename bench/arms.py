"""Arms of a comparison: what is served, and how it is spelled on the command line.

    --arm NAME:key=value,key=value      any number of times
    --arm deep:d1=2,block_size=6        TRUNC with options of its own
    --arm other:algorithm=trunc,--page-size=16,env.OMP_NUM_THREADS=2

``algorithm`` is the value of ``--speculative-algorithm`` (default ``trunc``; ``none`` for stock plain
decoding). A key that starts with ``--`` is a server flag, ``env.NAME`` an environment variable, anything
else an option of the algorithm, passed as ``SGLANG_TRUNC_<KEY>``. Every other value is the preset's, as for
any user. Without ``--arm`` the arms are plain, block1 (block size 1: plain decoding through the engine), trunc,
single and dual (the pipelines); their names may be used in ``--arm``, with further settings or without. Plain is
always there, since every ratio is taken against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

OPTION_PREFIX = "SGLANG_TRUNC_"
PLAIN = "plain"


@dataclass(frozen=True)
class Arm:
    name: str
    algorithm: str | None  # None: no speculation
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def server_args(self) -> list[str]:
        return [*(["--speculative-algorithm", self.algorithm] if self.algorithm else []), *self.flags]


DEFAULT_ARMS = (
    Arm(PLAIN, None),
    Arm("block1", "trunc", env={f"{OPTION_PREFIX}BLOCK_SIZE": "1"}),
    Arm("trunc", "trunc"),
    Arm("single", "loopspec_single"),
    Arm("dual", "loopspec_dual"),
)


def parse_arm(text: str) -> Arm:
    name, _, settings = text.partition(":")
    if not name:
        raise ValueError(f"an arm is NAME:key=value,..., got {text!r}")
    base = next((arm for arm in DEFAULT_ARMS if arm.name == name), Arm(name, "trunc"))
    algorithm, flags, env = base.algorithm, list(base.flags), dict(base.env)
    for entry in filter(None, settings.split(",")):
        key, equals, value = entry.partition("=")
        if key == "algorithm":
            algorithm = None if value == "none" else value
        elif key.startswith("--"):
            flags += [key, value] if equals else [key]
        elif not equals:
            raise ValueError(f"{entry!r} in arm {name!r} lacks a value")
        elif key.startswith("env."):
            env[key.removeprefix("env.")] = value
        else:
            env[OPTION_PREFIX + key.upper()] = value
    if name == PLAIN and algorithm:
        algorithm = None
    return Arm(name, algorithm, tuple(flags), env)


def chosen(texts: Sequence[str]) -> list[Arm]:
    """The arms asked for, plain first."""
    arms = [parse_arm(text) for text in texts] if texts else list(DEFAULT_ARMS)
    if PLAIN not in [arm.name for arm in arms]:
        arms.insert(0, DEFAULT_ARMS[0])
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ValueError(f"two arms have the same name: {', '.join(names)}")
    return sorted(arms, key=lambda arm: arm.name != PLAIN)
