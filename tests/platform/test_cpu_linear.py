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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_the_number_of_rows_or_threads(dtype, shape):
    torch.manual_seed(0)
    layer = PackedLinear(torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype))
    x = torch.randn(max(ROWS), shape[1]).to(dtype)
    together = layer(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in ROWS:
            assert torch.equal(layer(x[:rows]), together[:rows]), rows
            assert torch.equal(layer(x[-rows:]), together[-rows:]), rows


def test_other_rows_may_hold_anything():
    torch.manual_seed(0)
    layer = PackedLinear(torch.randn(70, 64).bfloat16())
    x = torch.randn(15, 64).bfloat16()
    clean = layer(x)
    x[::2] = float("nan")
    assert torch.equal(layer(x)[1::2], clean[1::2])


def test_strided_rows_and_a_given_output():
    torch.manual_seed(0)
    layer = PackedLinear(torch.randn(70, 64).bfloat16())
    wide, out = torch.randn(5, 192).bfloat16(), torch.full((5, 140), 7.0).bfloat16()
    result = layer(wide[:, 64:128], out=out[:, :70])
    assert torch.equal(result, layer(wide[:, 64:128].contiguous()))
    assert (out[:, 70:] == 7).all()


def test_a_padding_of_outputs_is_never_written():
    layer = PackedLinear(torch.randn(33, 64).bfloat16())
    out = torch.full((4, 64), 7.0).bfloat16()
    layer(torch.randn(3, 64).bfloat16(), out=out[:3, :33])
    assert (out[3] == 7).all()
    assert (out[:, 33:] == 7).all()


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="float16"):
        PackedLinear(torch.zeros(2, 2, dtype=torch.float16))
    with pytest.raises(ValueError, match="3 inputs"):
        PackedLinear(torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="float32"):
        PackedLinear(torch.zeros(2, 4, dtype=torch.bfloat16))(torch.zeros(1, 4))


def test_no_rows():
    assert PackedLinear(torch.randn(40, 64).bfloat16())(torch.empty(0, 64).bfloat16()).shape == (0, 40)
