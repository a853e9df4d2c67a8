"""LLVM building blocks of the CPU kernels: sixteen lanes of float32, spelled out.

These functions run while a kernel is compiled and append instructions to an llvmlite builder. ``cpu_vector``
wraps them as functions that compiled code calls; ``cpu_tiles`` and ``cpu_gemm`` build whole register tiles from
them. No fast-math flag is ever set, so LLVM reassociates nothing: the order of every sum is the order written
here and there. LLVM lowers the vectors to AVX-512, to pairs of AVX2 registers or to NEON.

Addresses are i64 in bytes; loads and stores need no alignment beyond that of an element.
``paired`` data is bfloat16 handled as 32-bit entries of two.
"""

from __future__ import annotations

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, config

LANES = 16
I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VF32, VI32, VI16 = (ir.VectorType(kind, LANES) for kind in (F32, I32, I16))


def _has(feature: str) -> bool:
    """Whether the processor that numba compiles for (this one, or what NUMBA_CPU_FEATURES says) has a feature."""
    if config.CPU_FEATURES is None:
        return bool(llvmlite.binding.get_host_cpu_features().get(feature))
    return f"+{feature}" in config.CPU_FEATURES


HAS_WIDE, HAS_DOT = _has("avx512f"), _has("avx512bf16")


class _BFloat(ir.types._BaseFloatType):
    """LLVM's bfloat, which llvmlite does not name; only ever the element of a bitcast."""

    intrinsic_name = "bf16"

    def __str__(self):
        return "bfloat"


_BFloat._create_instance()


def splat(builder, scalar):
    """All lanes equal to an LLVM scalar."""
    vector = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    vector = builder.insert_element(vector, scalar, I32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(VI32, [0] * LANES))


def call(builder, name, result, args):
    """Call an LLVM intrinsic by its mangled name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fused(builder, a, b, c):
    return call(builder, "llvm.fma.v16f32", VF32, [a, b, c])


def at(builder, address, kind):
    """Pointer to ``kind`` from an integer address."""
    return builder.inttoptr(address, kind.as_pointer())


def lanes_below(builder, n):
    """Mask of the first ``n`` (i64) lanes."""
    count = splat(builder, builder.trunc(n, I32))
    return builder.icmp_signed("<", ir.Constant(VI32, list(range(LANES))), count)


def read(builder, address, kind=VF32, align=4):
    return builder.load(at(builder, address, kind), align=align)


def write(builder, value, address, align=4):
    builder.store(value, at(builder, address, value.type), align=align)


def fetch(builder, address):
    """Ask for one cache line ahead of time, into the second level."""
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [at(builder, address, ir.IntType(8)), I32(0), I32(2), I32(1)])


def _suffix(kind):
    return "v16f32" if kind == VF32 else "v16i16"


def read_first(builder, address, n, kind=VF32):
    """First ``n`` lanes from memory, zeros after; touches nothing behind them."""
    args = [at(builder, address, kind), I32(2), lanes_below(builder, n), ir.Constant(kind, None)]
    return call(builder, f"llvm.masked.load.{_suffix(kind)}.p0", kind, args)


def write_first(builder, value, address, n):
    args = [value, at(builder, address, value.type), I32(2), lanes_below(builder, n)]
    call(builder, f"llvm.masked.store.{_suffix(value.type)}.p0", ir.VoidType(), args)


def widen(builder, half):
    """bfloat16 bits to float32."""
    bits = builder.shl(builder.zext(half, VI32), ir.Constant(VI32, [16] * LANES))
    return builder.bitcast(bits, VF32)


def rounded_bits(builder, value):
    """float32 to bfloat16 bits, to nearest even, NaN to 0x7fc0 as torch does; denormals are kept."""
    bits = builder.bitcast(value, VI32)
    even = builder.and_(builder.lshr(bits, ir.Constant(VI32, [16] * LANES)), ir.Constant(VI32, [1] * LANES))
    bits = builder.add(builder.add(bits, even), ir.Constant(VI32, [0x7FFF] * LANES))
    bits = builder.lshr(bits, ir.Constant(VI32, [16] * LANES))
    is_nan = builder.fcmp_unordered("uno", value, value)
    bits = builder.select(is_nan, ir.Constant(VI32, [0x7FC0] * LANES), bits)
    return builder.trunc(bits, VI16)


def folded(builder, vectors):
    """Lane ``i`` of the result is the sum of ``vectors[i]``; every vector is summed by the same tree,
    halves first: ``l[j] + l[j + 8]``, then ``+ 4``, ``+ 2``, ``+ 1``."""
    half = LANES // 2
    while half:
        order = [[], []]
        for side in (0, 1):
            for start in range(0, LANES, 2 * half):
                begin = start + side * half
                order[side] += [begin + j for j in range(half)] + [LANES + begin + j for j in range(half)]
        masks = [ir.Constant(VI32, lanes) for lanes in order]
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, masks[0]), builder.shuffle_vector(a, b, masks[1]))
            for a, b in pairs
        ]
        half //= 2
    return vectors[0]


def folded_alone(builder, vector, combine):
    """Reduce one vector by the tree of ``folded``; the result is in lane 0."""
    for half in (8, 4, 2, 1):
        order = ir.Constant(VI32, [(j + half) % LANES for j in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, order))
    return builder.extract_element(vector, I32(0))


def maximum(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def low_half(builder, entry):
    """First of the two bfloat16 in every 32-bit entry, as float32."""
    return builder.bitcast(builder.shl(entry, ir.Constant(VI32, [16] * LANES)), VF32)


def high_half(builder, entry):
    return builder.bitcast(builder.and_(entry, ir.Constant(VI32, [-65536] * LANES)), VF32)


def step(builder, paired, total, x, y):
    """``total + x * y`` per lane; an entry is a float32, or if ``paired`` two bfloat16: both products are added."""
    if not paired:
        return fused(builder, builder.bitcast(x, VF32), builder.bitcast(y, VF32), total)
    if HAS_DOT:
        pairs = ir.VectorType(_BFloat(), 2 * LANES)
        args = [total, builder.bitcast(x, pairs), builder.bitcast(y, pairs)]
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VF32, args)
    total = fused(builder, low_half(builder, x), low_half(builder, y), total)
    return fused(builder, high_half(builder, x), high_half(builder, y), total)


def by_case(builder, values, cases, emit):
    """One version of some code per case, chosen at run time: ``values`` are compared with the tuples in ``cases``."""
    end = builder.append_basic_block("done")
    index = values[0]
    for value in values[1:]:
        index = builder.add(builder.shl(index, I64(4)), value)
    choice = builder.switch(index, end)
    for case in cases:
        number = 0
        for part in case:
            number = number * 16 + part
        block = builder.append_basic_block("case")
        choice.add_case(I64(number), block)
        builder.position_at_end(block)
        emit(*case)
        builder.branch(end)
    builder.position_at_end(end)
