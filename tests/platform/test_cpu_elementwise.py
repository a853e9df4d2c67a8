"""Fused elementwise kernels against the published formulas in torch, and their independence of other rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_trunc.platform.cpu_elementwise import (
    add_rms_norm,
    rms_norm,
    rms_norm_add,
    rope,
    rope_store,
    silu_mul,
    store_rows,
)

EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float32]


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def assert_same_rounding(ours: Tensor, theirs: Tensor, largest: Tensor) -> None:
    """Equal nearly everywhere, else one unit in the last place of the ``largest`` term that was rounded."""
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        return
    ulp = torch.ldexp(torch.ones_like(largest.float()), torch.frexp(largest.float()).exponent - 8)
    assert ((ours.float() - theirs.float()).abs() <= ulp).all()
    assert (ours == theirs).float().mean() > 0.999


def operations(width: int, dtype: torch.dtype):
    gen = torch.Generator().manual_seed(width)
    weight = (1 + 0.2 * torch.randn(width, generator=gen)).to(dtype)
    return {
        "norm": (lambda x, r: rms_norm(x, weight, EPS), lambda x, r: torch_norm(x, weight)),
        "norm_add": (lambda x, r: rms_norm_add(x, weight, EPS, r), lambda x, r: r + torch_norm(x, weight)),
        "add_norm": (lambda x, r: add_rms_norm(x, r, weight, EPS), lambda x, r: torch_norm(x + r, weight)),
        "silu": (
            lambda x, r: silu_mul(torch.cat((x, r), -1)),
            lambda x, r: F.silu(x) * r,
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 100, 1024, 5280])
@pytest.mark.parametrize("name", ["norm", "norm_add", "add_norm", "silu"])
def test_row_operations(name, width, dtype):
    gen = torch.Generator().manual_seed(7)
    x, r = (3 * torch.randn(2, 300, width, generator=gen)).to(dtype)
    ours, theirs = operations(width, dtype)[name]
    together, expected = ours(x, r), theirs(x, r)
    largest = torch.maximum(expected.abs(), (expected - r).abs()) if name == "norm_add" else expected
    assert_same_rounding(together, expected, largest)
    for row in (0, 1, 150, 299):
        assert torch.equal(ours(x[row : row + 1], r[row : row + 1])[0], together[row])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(ours(x, r), together)


def test_norms_may_overwrite_their_inputs():
    x, r = torch.randn(2, 5, 64).bfloat16()
    weight = torch.rand(64).bfloat16()
    expected = rms_norm_add(x, weight, EPS, r)
    assert torch.equal(rms_norm_add(x, weight, EPS, r, out=r), expected)
    expected = rms_norm(x, weight, EPS)
    rms_norm(x, weight, EPS, out=x)
    assert torch.equal(x, expected)


def test_special_values():
    x = torch.tensor([[float("nan"), float("inf"), -100.0, 100.0, -0.0, 0.0, -88.5, 1e-30]]).bfloat16()
    ours, theirs = silu_mul(torch.cat((x, torch.ones_like(x)), -1)), F.silu(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-30, equal_nan=True)


def torch_rope(x: Tensor, cos: Tensor, sin: Tensor, dim: int, interleaved: bool, products: bool) -> Tensor:
    heads = x.view(x.shape[0], -1, dim)
    first, second = (heads[..., 0::2], heads[..., 1::2]) if interleaved else heads.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    if products:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    else:
        first, second = first.float(), second.float()
    low, high = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack((low, high), -1).flatten(-2) if interleaved else torch.cat((low, high), -1)
    return turned.to(x.dtype).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [64, 96, 128, 40, 24])
def test_rope_store(dim, interleaved, products, dtype):
    gen = torch.Generator().manual_seed(dim)
    fused = torch.randn(9, 8 * dim, generator=gen).to(dtype)
    q, k, v = fused.split([4 * dim, 2 * dim, 2 * dim], -1)
    angle = 6 * torch.rand(50, dim // 2, generator=gen)
    cos, sin = angle.cos(), angle.sin()
    if products:
        cos, sin = cos.to(dtype).float(), sin.to(dtype).float()
    positions = torch.randint(0, 50, (9,), generator=gen)
    expected = [torch_rope(x.clone(), cos[positions], sin[positions], dim, interleaved, products) for x in (q, k)]
    k_rows, v_rows = torch.full((2, 30, 2 * dim), float("nan"))
    locs = torch.randperm(30, generator=gen)[:9]
    alone = q.clone(), k.clone()
    rope(*alone, positions, cos, sin, dim, interleaved, products)
    rope_store(q, k, v, positions, cos, sin, k_rows, v_rows, locs, dim, interleaved, products)
    for ours, lonely, theirs in zip((q, k), alone, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(lonely, theirs)
    assert torch.equal(k_rows[locs], k.float())
    assert torch.equal(v_rows[locs], v.float())
    assert k_rows.isnan().any(-1).sum() == v_rows.isnan().any(-1).sum() == 21


@pytest.mark.parametrize(("dtype", "pool"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)])
def test_store_rows(dtype, pool):
    k, v = torch.randn(2, 5, 40).to(dtype)
    k_rows, v_rows = torch.zeros(2, 9, 40, dtype=pool)
    locs = torch.tensor([8, 3, 0, 1, 5])
    store_rows(k, v, k_rows, v_rows, locs)
    assert torch.equal(k_rows[locs], k.to(pool))
    assert torch.equal(v_rows[locs], v.to(pool))
    assert (k_rows[[2, 4, 6, 7]] == 0).all()
