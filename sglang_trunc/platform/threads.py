"""Thread settings of the GPU-less platform.

A spinning OpenMP barrier at the end of every product costs a factor of ten as soon as another process wants a
core, and SGLang runs three. ``OMP_WAIT_POLICY=passive`` must be set before the OpenMP runtime starts, so the
plugin sets it where it is first loaded; the thread count follows ``OMP_NUM_THREADS`` or the cores this
process may use.
"""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Set, where the user did not, what must stand before the OpenMP runtime is loaded; children inherit it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def configure() -> None:
    """Pin torch's thread count to ``OMP_NUM_THREADS`` or the usable cores."""
    import torch

    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdigit() and int(wanted) > 0 else len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
