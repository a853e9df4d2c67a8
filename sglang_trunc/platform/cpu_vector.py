"""Sixteen-lane float vectors for numba: the instruction set in which the CPU kernels are written.

Numba's loops leave the order of a sum to the optimiser; these kernels promise the same bits for a row however
many rows a call has, so they spell out lanes, chains and reductions themselves. ``F32x16`` is a numba type
that holds an LLVM ``<16 x float>``; each function below is an intrinsic on it, callable from compiled code only.
LLVM lowers them to AVX-512, to pairs of AVX2 registers or to NEON, so no kernel depends on the machine, and no
fast-math flag is ever set, so nothing is reassociated.

Contract: addresses are integers in bytes; loads and stores need no alignment. ``n`` arguments count lanes,
lanes from ``n`` on read as zero and are not written. ``cpu_kernel.kernel`` compiles what is built from these.
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

LANES = 16
I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VF32, VI32, VI16 = (ir.VectorType(kind, LANES) for kind in (F32, I32, I16))


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


def _folded_alone(builder, vector, combine):
    """Reduce one vector by the tree of ``folded``; the result is in lane 0."""
    for half in (8, 4, 2, 1):
        order = ir.Constant(VI32, [(j + half) % LANES for j in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, order))
    return builder.extract_element(vector, I32(0))


def maximum(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


# Functions of compiled code -----------------------------------------------------------------------------


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
        return _folded_alone(builder, args[0], builder.fadd)

    return types.float32(F32x16), generate


@intrinsic
def vtop(typing, vector):
    """Largest lane."""

    def generate(context, builder, signature, args):
        return _folded_alone(builder, args[0], lambda a, b: maximum(builder, a, b))

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
