"""Where a figure came from: code, versions, machine, command.

``collect`` returns what is written beside every result. A figure without it cannot be compared with another,
so a missing part is written as null and never guessed; a checkout with uncommitted changes says so.
Host names, user names and absolute paths are left out: paths below the current folder become relative,
other ones keep their last two parts.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("sglang-trunc", "sglang", "torch", "transformers", "numba", "triton")
# Variables that change speed or results; anything else stays private.
ENVIRONMENT = ("OMP_", "MKL_", "NUMBA_", "KMP_", "SGLANG_", "CUDA_VISIBLE", "LD_PRELOAD")


def collect(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """``env`` adds the variables that the measured servers get on top of this process's."""
    merged = {**os.environ, **(env or {})}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": git_state(),
        "argv": [shortened(part) for part in (sys.argv if argv is None else argv)],
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": cpu_model(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "memory_gb": memory_gb(),
            "accelerator": accelerator(),
        },
        "environment": {k: v for k, v in sorted(merged.items()) if k.startswith(ENVIRONMENT)},
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout this file lies in, and whether tracked files were changed."""
    sha = _git("rev-parse", "HEAD")
    if sha is None:
        return None
    return {"commit": sha, "modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpu_model() -> str | None:
    return _proc_field("/proc/cpuinfo", "model name") or platform.processor() or None


def memory_gb() -> float | None:
    total = _proc_field("/proc/meminfo", "MemTotal")
    return round(int(total.split()[0]) / 1024**2, 1) if total else None


def _proc_field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def accelerator() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def shortened(part: str) -> str:
    """An argument without the private part of an absolute path."""
    if not part.startswith(os.sep):
        return part
    path = Path(part)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return os.sep.join(path.parts[-2:])
