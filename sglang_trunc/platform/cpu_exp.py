"""Exponential of sixteen float32 lanes, within one ulp, from additions and fused products alone.

Softmax and SiLU share it. It has no branches and no tables, so a lane's result depends on that lane only.
Split: ``x = n ln 2 + r`` with ``|r| <= ln 2 / 2``, then ``1 + r + r^2 p(r)``, ``p`` of degree 4 (Chebyshev fit,
relative error 1.1e-8), times ``2**n``.
"""

from __future__ import annotations

from sglang_trunc.platform.cpu_vector import inlined, vadd, vfma, vmax, vmin, vmul, vpower2, vsplat, vsub


@inlined
def vexp(x):
    """``exp`` of every lane; below -87 it is ``exp(-87)``, about 1.6e-38, above 88 it is ``exp(88)``."""
    x = vmax(vsplat(-87.0), vmin(vsplat(88.0), x))  # in this order a NaN stays one
    shift = vsplat(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, in the low bits
    whole = vfma(x, vsplat(1.4426950408889634), shift)
    n = vsub(whole, shift)
    r = vfma(n, vsplat(-0.693145751953125), x)
    r = vfma(n, vsplat(-1.428606765330187e-06), r)
    p = vfma(vsplat(0.0013926184037700295), r, vsplat(0.008363178931176662))
    p = vfma(p, r, vsplat(0.041666556149721146))
    p = vfma(p, r, vsplat(0.16666576266288757))
    p = vfma(p, r, vsplat(0.5))
    tail = vfma(vmul(r, r), p, r)
    return vmul(vadd(tail, vsplat(1.0)), vpower2(whole))
