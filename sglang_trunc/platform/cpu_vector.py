"""Sixteen-lane float vectors for numba: the instruction set in which the CPU kernels are written.

Numba's loops leave the order of a sum to the optimiser; these kernels promise the same bits for a row however
many rows a call has, so they spell out lanes, chains and reductions themselves. ``F32x16`` is a numba type
that holds an LLVM ``<16 x float>``; each function below is an intrinsic on it, for compiled code only.

Contract: addresses are integers in bytes; loads and stores need no alignment. ``n`` arguments count lanes,
lanes from ``n`` on read as zero and are not written. ``cpu_kernel.Kernel`` compiles what is built from these.
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

from sglang_trunc.platform.cpu_emit import (
    F32,
    I32,
    I64,
    LANES,
    VF32,
    VI16,
    VI32,
    at,
    folded_alone,
    fused,
    lanes_below,
    maximum,
    read,
    read_first,
    rounded_bits,
    splat,
    widen,
    write,
    write_first,
)


class _F32x16(types.Type):
    def __init__(self):
        super().__init__(name="f32x16")


F32x16 = _F32x16()


@register_model(_F32x16)
class _F32x16Model(PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, VF32)


inlined = numba.njit(error_model="numpy", nogil=True)
"""A helper that only kernels call; it is compiled with them, and LLVM inlines it where that pays."""


def _operation(emit):
    """A function of one to three vectors."""
    arity = emit.__code__.co_argcount - 1

    def generate(context, builder, signature, args):
        return emit(builder, *args)

    if arity == 1:
        return intrinsic(lambda typing, a: (F32x16(F32x16), generate))
    if arity == 2:
        return intrinsic(lambda typing, a, b: (F32x16(F32x16, F32x16), generate))
    return intrinsic(lambda typing, a, b, c: (F32x16(F32x16, F32x16, F32x16), generate))


vadd = _operation(lambda builder, a, b: builder.fadd(a, b))
vsub = _operation(lambda builder, a, b: builder.fsub(a, b))
vmul = _operation(lambda builder, a, b: builder.fmul(a, b))
vdiv = _operation(lambda builder, a, b: builder.fdiv(a, b))
vmax = _operation(maximum)
vmin = _operation(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
vfma = _operation(lambda builder, a, b, c: fused(builder, a, b, c))
vneg = _operation(lambda builder, a: builder.fneg(a))
vround = _operation(lambda builder, a: widen(builder, rounded_bits(builder, a)))
"""Round every lane to bfloat16 and back."""


@intrinsic
def vsplat(typing, scalar):
    return F32x16(types.float32), lambda context, builder, signature, args: splat(builder, args[0])


@intrinsic
def vsum(typing, vector):
    """Sum of the lanes, by the tree of ``folded``."""

    def generate(context, builder, signature, args):
        return folded_alone(builder, args[0], builder.fadd)

    return types.float32(F32x16), generate


@intrinsic
def vtop(typing, vector):
    """Largest lane."""

    def generate(context, builder, signature, args):
        return folded_alone(builder, args[0], lambda a, b: maximum(builder, a, b))

    return types.float32(F32x16), generate


@intrinsic
def vpower2(typing, whole):
    """``2 ** lane`` for whole-numbered lanes in [-126, 127] that carry the 1.5 * 2**23 of ``vexp``."""

    def generate(context, builder, signature, args):
        bits = builder.shl(builder.bitcast(args[0], VI32), ir.Constant(VI32, [23] * LANES))
        return builder.bitcast(builder.add(bits, ir.Constant(VI32, [127 << 23] * LANES)), VF32)

    return F32x16(F32x16), generate


@intrinsic
def vkeep(typing, vector, n, other):
    """First ``n`` lanes of ``vector``, ``other`` in the rest."""

    def generate(context, builder, signature, args):
        vector, n, other = args
        return builder.select(lanes_below(builder, n), vector, splat(builder, other))

    return F32x16(F32x16, types.int64, types.float32), generate


def _shuffle(order):
    return _operation(lambda builder, a, b: builder.shuffle_vector(a, b, ir.Constant(VI32, list(order))))


# Two vectors that hold sixteen pairs, to first and second elements and back.
vfirsts, vseconds = _shuffle(range(0, 32, 2)), _shuffle(range(1, 32, 2))
vpairs_low = _shuffle(lane for i in range(8) for lane in (i, 16 + i))
vpairs_high = _shuffle(lane for i in range(8, 16) for lane in (i, 16 + i))


@intrinsic
def vload(typing, address):
    return F32x16(types.int64), lambda context, builder, signature, args: read(builder, args[0])


@intrinsic
def vload_first(typing, address, n):
    def generate(context, builder, signature, args):
        return read_first(builder, *args)

    return F32x16(types.int64, types.int64), generate


@intrinsic
def vload_bf16(typing, address):
    def generate(context, builder, signature, args):
        return widen(builder, read(builder, args[0], VI16, align=2))

    return F32x16(types.int64), generate


@intrinsic
def vload_bf16_first(typing, address, n):
    def generate(context, builder, signature, args):
        return widen(builder, read_first(builder, *args, VI16))

    return F32x16(types.int64, types.int64), generate


@intrinsic
def vstore(typing, address, value):
    def generate(context, builder, signature, args):
        write(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, F32x16), generate


@intrinsic
def vstore_first(typing, address, value, n):
    def generate(context, builder, signature, args):
        write_first(builder, args[1], args[0], args[2])
        return context.get_dummy_value()

    return types.void(types.int64, F32x16, types.int64), generate


@intrinsic
def vstore_bf16(typing, address, value):
    def generate(context, builder, signature, args):
        write(builder, rounded_bits(builder, args[1]), args[0], align=2)
        return context.get_dummy_value()

    return types.void(types.int64, F32x16), generate


@intrinsic
def vstore_bf16_first(typing, address, value, n):
    def generate(context, builder, signature, args):
        write_first(builder, rounded_bits(builder, args[1]), args[0], args[2])
        return context.get_dummy_value()

    return types.void(types.int64, F32x16, types.int64), generate


@intrinsic
def vstore_pairs_first(typing, address, low, high, n):
    """Two vectors, rounded to bfloat16, as ``n`` interleaved pairs."""

    def generate(context, builder, signature, args):
        address, low, high, n = args
        low, high = (builder.zext(rounded_bits(builder, value), VI32) for value in (low, high))
        pairs = builder.or_(low, builder.shl(high, ir.Constant(VI32, [16] * LANES)))
        write_first(builder, builder.bitcast(pairs, VF32), address, n)
        return context.get_dummy_value()

    return types.void(types.int64, F32x16, F32x16, types.int64), generate


def _scalar_load(kind, result):
    def generate(context, builder, signature, args):
        value = read(builder, args[0], kind, align=kind.width // 8 if kind != F32 else 4)
        return builder.sext(value, I64) if kind == I32 else value

    return intrinsic(lambda typing, address: (result(types.int64), generate))


load_i32, load_i64, load_f32 = (
    _scalar_load(kind, result) for kind, result in ((I32, types.int64), (I64, types.int64), (F32, types.float32))
)


def _scalar_store(kind, source):
    def generate(context, builder, signature, args):
        write(builder, args[1], args[0], align=8 if kind == I64 else 4)
        return context.get_dummy_value()

    return intrinsic(lambda typing, address, value: (types.void(types.int64, source), generate))


store_i64, store_f32 = _scalar_store(I64, types.int64), _scalar_store(F32, types.float32)


@intrinsic
def take_ticket(typing, address):
    """Atomically add one to the int64 at ``address`` and return what it was."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", at(builder, args[0], I64), I64(1), "monotonic")

    return types.int64(types.int64), generate
