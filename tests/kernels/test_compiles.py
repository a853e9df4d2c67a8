"""Every kernel compiles for a GPU that is not here, from the arguments that its wrapper passes.

The interpreter runs what the compiler may refuse, so the launches are recorded and their kernels given to Triton with
an explicit target: no driver and no device take part. Checked on the result: no local memory in the attention (its tile
fits the registers), and the float64 constants of the noise.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_trunc.kernels import choice_triton, lane_attention_triton, noise_triton, row_moves_triton
from sglang_trunc.kernels import row_pointers_triton as row_pointers

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="this process interprets kernels")

TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Recorder:
    """Stands in for a kernel; keeps what it was launched with."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches: list[dict] = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launches.append(
            {**dict(zip(self.kernel.arg_names, arguments, strict=False)), **constants}
        )

    def compiled(self, capability):
        """The compiled form of each launch, specialised as Triton's launcher would."""
        return [self._compile(launch, capability) for launch in self.launches]

    def _compile(self, launch, capability):
        signature, constants, attributes = {}, {}, {}
        for place, name in enumerate(self.kernel.arg_names):
            value, parameter = launch[name], self.kernel.params[place]
            free = not parameter.do_not_specialize
            if parameter.is_constexpr or (free and isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
                continue
            signature[name] = type_name(value)
            free &= not parameter.do_not_specialize_on_alignment and not isinstance(value, float)
            if free and (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def type_name(value):
    """Triton's name for the type of an argument."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@pytest.fixture
def record(monkeypatch, tmp_path):
    """``record(module, *kernels)``: recorders in the kernels' place; nothing is read from Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def install(module, *names):
        recorders = [Recorder(getattr(module, name)) for name in names]
        for name, recorder in zip(names, recorders, strict=True):
            monkeypatch.setattr(module, name, recorder)
        return recorders

    return install


def local_memory(compiled, folder):
    """Bytes of local memory a thread uses, spills included."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def longs(*shape):
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "rows", "capability"),
    [
        (64, 1, torch.bfloat16, 1, 90),
        (96, 1, torch.bfloat16, 8, 80),
        (128, 1, torch.bfloat16, 8, 90),
        (64, 8, torch.bfloat16, 8, 90),
        (128, 4, torch.float32, 8, 90),
    ],
)
def test_lane_attention(record, tmp_path, dim, group, dtype, rows, capability):
    kernels = record(lane_attention_triton, "_partials", "_combine")
    q, pool = torch.zeros(rows, 2 * group * dim, dtype=dtype), torch.zeros(50, 2 * dim, dtype=dtype)
    lists = torch.zeros(99, dtype=torch.int32), longs(rows), longs(rows), longs(rows)
    tails = torch.zeros(rows, 3, dtype=torch.int32), longs(rows)
    lane_attention_triton.lane_attention_triton(q, pool, pool, *lists, torch.empty_like(q), 0.1, 2, *tails)
    lane_attention_triton.lane_attention_triton(q, pool, pool, *lists, torch.empty_like(q), 0.1, 2)
    for kernel in kernels:
        compiled = kernel.compiled(capability)
        assert len(compiled) == 2
        assert [local_memory(one, tmp_path) for one in compiled] == [0, 0]


@pytest.mark.parametrize("rows", [1, 5])
def test_row_moves(record, rows):
    kernels = record(row_moves_triton, "_gather", "_scatter", "_store")
    bank = torch.zeros(9, 2048, dtype=torch.bfloat16)
    moved = row_moves_triton.gather_rows_triton(bank, longs(rows))
    row_moves_triton.scatter_rows_triton(moved.float(), longs(rows), bank)
    row_moves_triton.store_rows_triton(moved, moved, bank, bank, longs(rows))
    assert [len(kernel.compiled(90)) for kernel in kernels] == [1, 1, 1]


@pytest.mark.parametrize("rows", [1, 5])
def test_row_pointers(record, rows):
    kernels = record(row_pointers, "_pointers", "_indices")
    lists = torch.zeros(99, dtype=torch.int32), *(longs(rows) for _ in range(4))
    filled = torch.zeros(rows + 1, dtype=torch.int32), longs(64), longs(rows)
    row_pointers.row_pointers_triton(*lists, *filled)
    row_pointers.row_pointers_triton(*lists, *filled, torch.zeros(rows, 4, dtype=torch.int32), longs(rows))
    assert [len(kernel.compiled(90)) for kernel in kernels] == [2, 2]


def test_noise_is_float64_by_division(record):
    (kernel,) = record(noise_triton, "_noise")
    noise_triton.murmur32_triton(longs(3), longs(3), longs(3000))
    noise_triton.gumbel_triton(longs(3), longs(3), longs(3000))
    hashes, noise = (one.asm["ptx"] for one in kernel.compiled(90))
    assert "f64" not in hashes
    assert "div.rn.f64" in noise
    assert "0d41EFFFFFFFE00000" in noise  # 2**32 - 1; a float32 constant would be 2**32
    assert "0dffefffffffffffff" in noise.lower()  # the least float64, not -inf


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 49152), (torch.float64, 1000)])
def test_choices(record, tmp_path, dtype, width):
    block, row = record(choice_triton, "_best_of_block", "_best_of_row")
    scores = torch.zeros(2, width, dtype=dtype)
    choice_triton.argmax_rows_triton(scores)
    choice_triton.perturbed_argmax_triton(scores, longs(2), longs(2))
    assert len(row.compiled(90)) == 2
    plain, perturbed = block.compiled(90)
    assert "add.f64" in perturbed.asm["ptx"] or "add.rn.f64" in perturbed.asm["ptx"]
    assert [local_memory(one, tmp_path) for one in (plain, perturbed)] == [0, 0]


@pytest.mark.parametrize("width", [1, 2, 9])
def test_acceptance(record, width):
    (kernel,) = record(choice_triton, "_count_accepted")
    choice_triton.count_accepted_triton(longs(4, width), longs(4, width), longs(4))
    assert len(kernel.compiled(90)) == 1
