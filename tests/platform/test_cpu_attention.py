"""Lane attention against float64, and its promise: a row's bits depend on that row alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import copy

import pytest
import torch
from torch import Tensor

from sglang_trunc.kernels import lane_attention as reference
from sglang_trunc.platform.cpu_attention import lane_attention

SLOTS = 700
SHAPES = [
    (16, 16, 64),
    (8, 2, 96),
    (4, 4, 128),
    (6, 3, 40),
    (10, 1, 80),
    (3, 3, 24),
    (5, 5, 16),
    (2, 1, 256),
    (64, 1, 32),
]
BF16, F32 = torch.bfloat16, torch.float32
TYPES = [(F32, F32), (BF16, F32), (BF16, BF16)]  # of the model and of the pool


class Case:
    """Rows of several requests and steps over one pool with shuffled slots."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, pool_dtype: torch.dtype = F32):
        gen = torch.Generator().manual_seed(0)
        self.kv_heads, self.dim, self.dtype = kv_heads, dim, dtype
        pool = torch.randn(2, 2 * SLOTS, kv_heads * dim, generator=gen)
        self.k, self.v = pool.to(dtype).to(pool_dtype)
        tables = [torch.randperm(SLOTS - 1, generator=gen) + 1 for _ in range(4)]
        self.indices = torch.cat(tables).int()
        # (table, length, step): a block of one request, its other step, prefill-like runs, zero, single rows
        rows = [(0, 97 + i, 0) for i in range(7)] + [(0, 97, 1), (0, 40, 1)] + [(1, 0, 0), (1, 5, 0), (1, 650, 0)]
        rows += [(2, 1 + i, 1) for i in range(70)] + [(3, 33, 0)] * 3 + [(3, 64, 1), (2, 32, 0)]
        table, length, step = (torch.tensor(column) for column in zip(*rows, strict=True))
        self.start, self.length, self.offset = table * (SLOTS - 1), length, step * SLOTS
        self.q = torch.randn(len(rows), heads * dim, generator=gen).to(dtype)

    def run(self, rows: Tensor | None = None, length_type: torch.dtype = torch.int32) -> Tensor:
        rows = torch.arange(len(self.q)) if rows is None else rows
        q = self.q[rows]
        out = torch.full_like(q, float("nan"))
        where = (self.start[rows], self.length[rows].to(length_type), self.offset[rows])
        scale, tails = self.dim**-0.5, self.tails(rows)
        return lane_attention(q, self.k, self.v, self.indices, *where, out, scale, self.kv_heads, *tails)

    def tails(self, _: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return None, None

    def slots(self, row: int) -> Tensor:
        start, length = self.start[row], self.length[row]
        return self.indices[start : start + length].long() + self.offset[row]

    def used(self) -> Tensor:
        """Which pool rows any query may read."""
        used = torch.zeros(2 * SLOTS, dtype=torch.bool)
        for row in range(len(self.q)):
            used[self.slots(row)] = True
        return used

    def expected(self) -> Tensor:
        repeats = self.q.shape[1] // (self.kv_heads * self.dim)
        rows = []
        for row, q in enumerate(self.q):
            slots = self.slots(row)
            k, v = (pool[slots].double().view(-1, self.kv_heads, self.dim) for pool in (self.k, self.v))
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            scores = torch.einsum("hd,thd->ht", q.double().view(-1, self.dim), k) * self.dim**-0.5
            rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v).flatten())
        return torch.stack(rows)


class TreeCase(Case):
    """The same rows; about half of them end in a tail, drawn at random, in a strided list.

    Spare entries of the lists lead to slot 0, which is nobody's, or out of the pool.
    """

    WIDTH = 40

    def __init__(self, *shape, **types):
        super().__init__(*shape, **types)
        gen = torch.Generator().manual_seed(1)
        rows = len(self.q)
        count = torch.randint(1, self.WIDTH + 1, (rows,), generator=gen) * torch.randint(2, (rows,), generator=gen)
        # Untailed neighbours, tails over block boundaries, of one token, of all tokens (33), behind a long stretch.
        count[:6] = torch.tensor([0, 0, 0, self.WIDTH, 1, 0])
        count[11] = count[44] = self.WIDTH
        count = count.minimum(self.length)
        self.shared = self.length - count
        self.buffer = torch.zeros(rows, self.WIDTH + 5, dtype=torch.int32)
        self.buffer[1::2] = 1 << 30
        for row in range(rows):
            self.buffer[row, 3 : 3 + count[row]] = torch.randperm(SLOTS - 1, generator=gen)[: count[row]].int() + 1

    def tails(self, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return self.buffer[rows][:, 3 : 3 + self.WIDTH], self.shared[rows]

    def slots(self, row: int) -> Tensor:
        start, shared, count = self.start[row], self.shared[row], self.length[row] - self.shared[row]
        ids = torch.cat((self.indices[start : start + shared], self.buffer[row, 3 : 3 + count]))
        return ids.long() + self.offset[row]

    def spelled_out(self) -> Case:
        """The same tokens without tails: every row in a stretch of its own."""
        flat = copy(self)
        flat.tails, flat.shared = super().tails, self.length
        lists = [self.slots(row) - self.offset[row] for row in range(len(self.q))]
        flat.indices, flat.start = torch.cat(lists).int(), self.length.cumsum(0) - self.length
        return flat


KINDS = [Case, TreeCase]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_float64(shape, types, kind):
    case = kind(*shape, *types)
    tolerance = 2e-6 if types[0] == F32 else 2**-7
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_company(shape, types, kind):
    case = kind(*shape, *types)
    together = case.run()
    for row in range(0, len(case.q), 3):
        assert torch.equal(case.run(torch.tensor([row]))[0], together[row]), row
    for seed in range(4):
        some = torch.randperm(len(case.q), generator=torch.Generator().manual_seed(seed))[: 5 + 20 * seed]
        assert torch.equal(case.run(some), together[some])
        assert torch.equal(case.run(some.sort().values), together[some.sort().values])


@pytest.mark.parametrize("shape", [(16, 16, 64), (10, 1, 80), (2, 1, 256)])
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_threads(shape, types, kind):
    case, results = kind(*shape, *types), []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        results.append(case.run())
        results.append(case.run(torch.arange(8)))
    assert all(torch.equal(result, results[0][: len(result)]) for result in results)


@pytest.mark.parametrize("pool_dtype", [BF16, F32])
@pytest.mark.parametrize("kind", KINDS)
def test_unread_slots_and_zero_length_are_harmless(pool_dtype, kind):
    case = kind(8, 2, 96, BF16, pool_dtype)
    clean = case.run()
    unused = ~case.used()
    case.k[unused] = float("nan")
    case.v[unused] = float("nan")
    assert torch.equal(case.run(length_type=torch.int64), clean)
    assert (clean[case.length == 0] == 0).all()


@pytest.mark.parametrize("shape", [(16, 16, 64), (8, 2, 96), (64, 1, 32)])
@pytest.mark.parametrize("types", TYPES)
def test_bits_do_not_depend_on_where_the_tail_begins(shape, types):
    case = TreeCase(*shape, *types)
    expected = case.spelled_out().run()
    assert torch.equal(case.run(), expected)
    some = torch.randperm(len(case.q), generator=torch.Generator().manual_seed(2))
    assert torch.equal(case.run(some, torch.int64), expected[some])


@pytest.mark.parametrize("shape", [(16, 16, 64), (8, 2, 96)])
@pytest.mark.parametrize("types", TYPES)
def test_tails_match_the_reference(shape, types):
    case = TreeCase(*shape, *types)
    for seed in range(3):
        # Without row 11: the reference pads to the longest.
        some = torch.randperm(len(case.q), generator=torch.Generator().manual_seed(seed))[:60]
        some = some[some != 11]
        expected = torch.empty_like(case.q[some])
        where = (case.start[some], case.length[some], case.offset[some])
        rest = (expected, case.dim**-0.5, case.kv_heads, *case.tails(some))
        reference.lane_attention(case.q[some], case.k, case.v, case.indices, *where, *rest)
        tolerance = 4e-6 if types[0] == F32 else 2**-7
        torch.testing.assert_close(case.run(some), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pool_dtype", [BF16, F32])
def test_a_neighbours_poison_stays_with_the_neighbour(pool_dtype):
    """The longest of rows that share a prefix has NaN and infinity behind the others' ends."""
    case = Case(4, 4, 128, BF16, pool_dtype)
    clean = case.run()
    tail = case.indices[case.start[6] + 101 : case.start[6] + 103].long()
    case.k[tail[0]], case.v[tail[0]] = float("nan"), float("inf")
    case.v[tail[1]] = float("nan")
    shorter = torch.arange(5)  # lengths 97..101 of one group
    assert torch.equal(case.run()[shorter], clean[shorter])


def test_padding_rows_and_strided_rows():
    case = Case(16, 16, 64, BF16)
    case.length[-5:], case.start[-5:], case.offset[-5:] = 1, 0, 0
    case.indices[0] = 0
    expected = case.run()
    wide = torch.zeros(len(case.q), 3 * 1024, dtype=BF16)
    wide[:, :1024] = case.q
    case.q = wide[:, :1024]
    out = torch.zeros(len(case.q), 2048, dtype=BF16)[:, 1024:]
    where = (case.start, case.length.int(), case.offset)
    lane_attention(case.q, case.k, case.v, case.indices, *where, out, 0.125, 16)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_peaked_and_far_apart_scores(scale):
    """Scores spread over hundreds: the running maximum moves, weights vanish, nothing overflows."""
    case = Case(4, 2, 64, F32)
    case.q *= scale
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=3e-5, atol=3e-5)


def test_no_rows():
    case = Case(16, 16, 64, BF16)
    assert case.run(torch.tensor([], dtype=torch.int64)).shape == (0, 1024)


def test_two_callers_at_once():
    """Working memory is each calling thread's own."""
    cases = [Case(*shape, BF16, BF16) for shape in ((16, 16, 64), (4, 4, 128))]
    expected = [case.run() for case in cases]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda case: case.run(), cases * 20))
    assert all(torch.equal(result, expected[i % 2]) for i, result in enumerate(results))
