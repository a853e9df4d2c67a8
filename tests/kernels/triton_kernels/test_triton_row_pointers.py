"""Packed row lists: the torch twin against plain Python, Triton against the twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_scene import Scene, lanes, on

from sglang_trunc.kernels.row_pointers import row_pointers
from sglang_trunc.kernels.row_pointers_triton import row_pointers_triton

SPARE = 5  # entries of the list behind the last token


def filled(fill, scene: Scene, with_tails: bool = True, capacity: int | None = None):
    """What ``fill`` writes into (indptr, indices, write_locs); untouched entries hold -7."""
    rows, device = len(scene.length), scene.q.device
    slots = 100 + torch.arange(rows, device=device)
    capacity = int(scene.length.sum()) + SPARE if capacity is None else capacity
    indptr = torch.full((rows + 1,), -7, dtype=torch.int32, device=device)
    indices = torch.full((capacity,), -7, dtype=torch.int64, device=device)
    write_locs = torch.full((rows,), -7, dtype=torch.int64, device=device)
    tails = (scene.tails, scene.shared) if with_tails else ()
    fill(scene.table, scene.start, scene.length, scene.offset, slots, indptr, indices, write_locs, *tails)
    return indptr, indices, write_locs


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("fill", [row_pointers, row_pointers_triton])
def test_lists_are_the_lanes_slots_in_order(device, fill):
    lengths, tails = [9, 0, 1, 600, 30], [2, 0, 1, 0, 30]
    scene = on(lanes(0, lengths, tails, 1, 1, 16), device)
    indptr, indices, write_locs = filled(fill, scene)
    table = scene.table.tolist()
    expected = []
    for row, (length, own) in enumerate(zip(lengths, tails, strict=True)):
        start, offset = int(scene.start[row]), int(scene.offset[row])
        ids = table[start : start + length - own] + scene.tails[row, :own].tolist()
        assert indptr[row] == len(expected)
        assert write_locs[row] == 100 + row + offset
        expected += [slot + offset for slot in ids]
    assert indptr[-1] == len(expected)
    assert indices.tolist() == expected + [-7] * SPARE


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.booleans())
def test_any_lanes(device, lengths, with_tails):
    tails = [min(length, index) if with_tails else 0 for index, length in enumerate(lengths)]
    scene = on(lanes(sum(lengths), lengths, tails, 1, 1, 16), device)
    assert equal(filled(row_pointers_triton, scene, with_tails), filled(row_pointers, scene, with_tails))


def test_more_rows_than_one_block_and_rows_of_padding(device):
    """The running sum crosses a block of rows; most rows are padding of length 1."""
    scene = on(lanes(1, [3, 1, 12, 7], [1, 0, 0, 0], 1, 1, 16), device)
    scene = scene.rows([0, 2, 3] + [1] * 300 + [2])
    assert equal(filled(row_pointers_triton, scene), filled(row_pointers, scene))


def test_a_row_alone_lists_what_it_lists_in_company(device):
    scene = on(lanes(2, [5, 33, 2], [0, 4, 0], 1, 1, 16), device)
    indptr, indices, _ = filled(row_pointers_triton, scene)
    for row in range(3):
        alone = filled(row_pointers_triton, scene.rows([row]))[1][:-SPARE]
        assert torch.equal(alone, indices[indptr[row] : indptr[row + 1]])


def test_nothing_is_written_behind_the_capacity(device):
    scene = on(lanes(3, [5, 33, 2], [0, 4, 0], 1, 1, 16), device)
    whole = filled(row_pointers, scene)
    buffer = torch.full((30,), -7, dtype=torch.int64, device=device)

    def fill(*arguments):
        row_pointers_triton(*arguments[:6], buffer[:20], *arguments[7:])

    indptr, _, _ = filled(fill, scene, capacity=20)
    assert torch.equal(indptr, whole[0])
    assert torch.equal(buffer[:20], whole[1][:20])
    assert (buffer[20:] == -7).all()
    assert equal(filled(row_pointers, scene, capacity=20)[1:2], (buffer[:20],))


def test_no_rows(device):
    scene = on(lanes(4, [5], [0], 1, 1, 16), device).rows([])
    indptr, indices, _ = filled(row_pointers_triton, scene)
    assert indptr.tolist() == [0]
    assert (indices == -7).all()


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (1, torch.zeros(2, dtype=torch.int64), r"kv_start: wanted int64 \[1\]"),
        (5, torch.zeros(1, dtype=torch.int32), r"indptr: wanted int32 \[2\]"),
        (5, torch.zeros(2, dtype=torch.int64), r"indptr: wanted int32"),
        (6, torch.zeros(9, dtype=torch.int32), r"indices: wanted int64 \[any\]"),
        (8, None, "kv_tails and kv_shared go together"),
    ],
)
def test_a_wrong_argument_is_named(device, place, wrong, words):
    scene = on(lanes(5, [5], [0], 1, 1, 16), device)

    def fill(*arguments):
        changed = list(arguments)
        changed[place] = None if wrong is None else wrong.to(device)
        row_pointers_triton(*changed)

    with pytest.raises(ValueError, match=words):
        filled(fill, scene)
