"""Packed linear layers: the right product, and the same bits for a row in a call of any size."""

from __future__ import annotations

import pytest
import torch

from sglang_trunc.platform.cpu_linear import PackedLinear

SHAPES = [(128, 128), (2048, 2048), (2048, 5632), (3072, 1024), (192, 64), (1000, 96)]
ROWS = [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 64, 100, 128, 257]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product(dtype, with_bias):
    torch.manual_seed(0)
    weight, x = torch.randn(192, 320).to(dtype), torch.randn(9, 320).to(dtype)
    bias = torch.randn(192).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    layer = PackedLinear(weight, bias)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for rows in (1, 2, 9):
        ours = layer(x[:rows])
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), expected[:rows], rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_the_number_of_rows(shape, threads):
    torch.manual_seed(0)
    layer = PackedLinear(torch.randn(shape).bfloat16())
    x = torch.randn(max(ROWS), shape[1]).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = layer(x)
        for rows in ROWS:
            assert torch.equal(layer(x[:rows]), together[:rows]), rows
            assert torch.equal(layer(x[-rows:]), together[-rows:]), rows
    finally:
        torch.set_num_threads(before)
