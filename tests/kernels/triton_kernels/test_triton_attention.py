"""Triton lane attention against its torch twin, and its promise that company changes no bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_scene import lanes, on

from sglang_trunc.kernels.lane_attention import lane_attention
from sglang_trunc.kernels.lane_attention_triton import block_tokens, lane_attention_triton

# 16 tokens a split, 4 splits: from 65 tokens on splits grow, to 32 tokens, then 48.
SMALL = {"split_tokens": 16, "max_splits": 4}
LENGTHS, TAILS = [9, 64, 65, 140, 1, 0, 33, 33], [0, 5, 0, 40, 1, 0, 33, 0]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dim", "kv_heads", "group"), [(64, 2, 1), (96, 1, 3), (128, 2, 2)])
def test_mixed_steps_tails_and_empty_rows(device, dim, kv_heads, group):
    scene = on(lanes(dim, LENGTHS, TAILS, kv_heads, group, dim), device)
    out = scene.run(lane_attention_triton, **SMALL)
    close(out, scene.run(lane_attention))
    assert (out[5] == 0).all()


@pytest.mark.parametrize("extra", ["none", "no room"])
def test_without_tails(device, extra):
    scene = on(lanes(1, LENGTHS, [0] * 8, 1, 2, 64), device)
    scene = scene._replace(tails=scene.tails[:, :0])
    out = scene.run(lane_attention_triton, extra == "no room", **SMALL)
    close(out, scene.run(lane_attention, False))


def test_the_splits_of_a_server(device):
    """The default sizes: one split, two, and more tokens than 32 splits of 256 hold would need too long here."""
    scene = on(lanes(2, [255, 256, 257, 700], [0, 0, 3, 0], 1, 1, 64), device)
    close(scene.run(lane_attention_triton), scene.run(lane_attention))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_lanes(device, data):
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))
    tails = [data.draw(st.integers(0, min(length, 6))) for length in lengths]
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    dim = data.draw(st.sampled_from([16, 24, 96]))
    scene = on(lanes(len(lengths), lengths, tails, kv_heads, group, dim), device)
    options = {"split_tokens": data.draw(st.integers(1, 40)), "max_splits": data.draw(st.sampled_from([1, 2, 8]))}
    close(scene.run(lane_attention_triton, **options), scene.run(lane_attention))


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 4)])
def test_company_width_and_padding_change_no_bit(device, kv_heads, group):
    scene = on(lanes(3, LENGTHS, TAILS, kv_heads, group, 64), device)
    together = scene.run(lane_attention_triton, **SMALL)
    for row in range(len(LENGTHS)):
        assert torch.equal(scene.rows([row]).run(lane_attention_triton, **SMALL)[0], together[row])
    shuffled = [3, 4, 4, 0, 7, 4, 2, 1, 6, 5, 4]
    assert torch.equal(scene.rows(shuffled).run(lane_attention_triton, **SMALL), together[shuffled])


def test_a_token_found_in_the_tail_or_in_the_table_gives_the_same_bits(device):
    scene = on(lanes(4, [50, 70], [6, 20], 2, 1, 64), device)
    table = scene.table.clone()
    start, shared, length = (int(part[1]) for part in (scene.start, scene.shared, scene.length))
    table[start + shared : start + length] = scene.tails[1, : length - shared]
    branch, won = scene.rows([1]), scene._replace(table=table).rows([1])
    assert torch.equal(won.run(lane_attention_triton, False), branch.run(lane_attention_triton))


def test_rows_that_lie_apart_and_wide_tables(device):
    """Query rows inside a fused q/k/v product, output rows with a gap, int64 ids."""
    scene = on(lanes(5, [20, 33, 3], [2, 0, 0], 1, 2, 64), device)
    expected = scene.run(lane_attention)
    fused = torch.full((3, 4 * 64), float("nan"), device=device)
    fused[:, 64:192] = scene.q
    out = torch.full((3, 2 * 128), 7.0, device=device)
    scene._replace(q=fused[:, 64:192], table=scene.table.long(), tails=scene.tails.long()).run(
        lambda q, k, v, table, start, length, offset, _, *rest: lane_attention_triton(
            q, k, v, table, start, length, offset, out[:, :128], *rest
        )
    )
    close(out[:, :128], expected)
    assert (out[:, 128:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_rows_are_summed_in_float32(device, dtype):
    scene = on(lanes(6, [40, 90], [0, 3], 2, 2, 64), device)
    half = {name: getattr(scene, name).to(dtype) for name in ("q", "k_rows", "v_rows")}
    expected = scene._replace(**{name: part.float() for name, part in half.items()}).run(lane_attention)
    scene = scene._replace(**half)
    out = torch.empty_like(expected)
    scene.run(lambda *arguments, **options: lane_attention_triton(*arguments[:7], out, *arguments[8:], **options))
    close(out, expected)
    # The interpreter cuts float32 down to bf16 where compiled code rounds: one last place.
    rounded = scene.run(lane_attention_triton)
    assert rounded.dtype == dtype
    torch.testing.assert_close(rounded.float(), expected, rtol=2**-7, atol=1e-6)


def test_a_block_follows_the_shape_of_a_head_alone():
    assert [block_tokens(1, 64), block_tokens(1, 128), block_tokens(4, 64), block_tokens(8, 128)] == [64, 32, 16, 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start": torch.zeros(3, dtype=torch.int32)}, r"kv_start: wanted int64 \[3\]"),
        ({"length": torch.zeros(2, dtype=torch.int64)}, r"kv_len: wanted int64 \[3\].*got int64 \[2\]"),
        ({"shared": None}, "kv_tails and kv_shared go together"),
        ({"kv_heads": 3}, "do not divide into 3 K/V heads"),
        ({"q": torch.zeros(3, 96)}, "do not divide"),
        ({"q": torch.zeros(64, 3).t()}, "q: wanted .*strides"),
        ({"v_rows": torch.zeros(5, 64, dtype=torch.float64)}, "v_rows: wanted float32"),
        ({"table": torch.zeros(2, 9, dtype=torch.int32)}, r"kv_indices: wanted int32 or int64 \[any\]"),
    ],
)
def test_a_wrong_argument_is_named(device, change, words):
    scene = on(lanes(7, [4, 2, 1], [0, 0, 0], 1, 1, 64), device)
    change = {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in change.items()}
    with pytest.raises(ValueError, match=words):
        scene._replace(**change).run(lane_attention_triton)


def test_split_counts_are_powers_of_two(device):
    with pytest.raises(ValueError, match="power of two"):
        on(lanes(8, [4], [0], 1, 1, 64), device).run(lane_attention_triton, max_splits=3)
