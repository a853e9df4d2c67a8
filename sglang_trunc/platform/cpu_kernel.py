"""Compiling and starting the CPU kernels: one function, one block of integers, any number of threads.

A kernel is a Python function of one address. It finds an int64 block there: a ticket counter, the number of
tasks, then its own parameters (addresses, strides, sizes). It takes tickets until they are used up, so the same
machine code serves one thread, called directly, and many, started by the OpenMP runtime that torch has already
loaded: its pool is idle whenever a kernel runs, ``OMP_WAIT_POLICY`` and ``torch.set_num_threads`` mean the same
for both, and a second runtime (numba's layers bring one) never competes with it. Without such a
runtime kernels run on the calling thread.

Contract: tasks are independent and a task's result does not depend on who runs it, so the number of threads
never changes a bit. Everything is compiled at import, from a disk cache where there is one, never at a request.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from array import array
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from numba import types
from numba.core.ccallback import CFunc

from sglang_trunc.platform.cpu_vector import inlined, load_i64, take_ticket


def _content() -> str:
    """What kernels of other files inline: an edit there outdates their cached code, which numba cannot see."""
    files = [
        Path(__file__).with_name(f"cpu_{name}.py")
        for name in ("attention_cells", "emit", "exp", "kernel", "tiles", "vector")
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _fork_join() -> Callable | None:
    """``GOMP_parallel`` of the OpenMP runtime in this process; LLVM's and Intel's runtimes export it too."""
    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    loaded = dict.fromkeys(line.split()[-1] for line in lines if "omp" in line and ".so" in line)
    # A process may hold two runtimes; the one beside torch is the one torch uses.
    beside = str(Path(torch.__file__).parent)
    for path in sorted(loaded, key=lambda path: not path.startswith(beside)):
        try:
            start = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        start.restype = None
        return start
    return None


_CONTENT = _content()
_FORK_JOIN = _fork_join()
_SIGNATURE = ((types.int64,), types.void)


@inlined
def next_task(block):
    """Index of the caller's next task, -1 when there are none left."""
    ticket = take_ticket(block)
    return ticket if ticket < load_i64(block + 8) else -1


@inlined
def parameter(block, index):
    """The ``index``-th integer a kernel was started with."""
    return load_i64(block + 16 + 8 * index)


@lru_cache(maxsize=256)
def float_bits(value: float) -> int:
    """A float32 as an integer parameter."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


class Scratch(threading.local):
    """Working memory of a kernel; grows to the largest call, is kept, and is each calling thread's own."""

    def __init__(self):
        self.memory = torch.empty(0, dtype=torch.uint8)

    def address(self, size: int) -> int:
        """Of at least ``size`` bytes, on a cache line; valid until the next call."""
        if self.memory.numel() < size + 64:
            self.memory = torch.empty(size + 64, dtype=torch.uint8)
        return (self.memory.data_ptr() + 63) // 64 * 64


class Kernel:
    """A compiled kernel; ``start(tasks, *parameters)`` runs it to the end."""

    def __init__(self, function: Callable[[int], None]):
        compiled = CFunc(function, _SIGNATURE, locals={}, options={"error_model": "numpy"})
        try:
            compiled.enable_caching()
            file = compiled._cache._cache_file
            file._source_stamp = (file._source_stamp, _CONTENT)
            compiled.compile()
        except (AttributeError, OSError, RuntimeError):  # nowhere to write, or a numba with other internals
            compiled = CFunc(function, _SIGNATURE, locals={}, options={"error_model": "numpy"})
            compiled.compile()
        self._compiled = compiled
        self._address = compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._address)

    def start(self, tasks: int, *parameters: int) -> None:
        block = array("q", (0, tasks, *parameters))
        threads = min(tasks, torch.get_num_threads()) if tasks > 1 else 1
        if threads == 1 or _FORK_JOIN is None:
            self._call(block.buffer_info()[0])
        else:
            _FORK_JOIN(self._address, block.buffer_info()[0], threads, 0)
