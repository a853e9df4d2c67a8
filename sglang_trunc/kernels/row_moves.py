"""Rows into and out of the state bank, in plain torch: the reference of ``row_moves_triton``.

A tick gathers the hidden states of its rows from the bank, runs the model and scatters them back (``engine.rows``). The
bank's last row is the *spare* row. A padding row names it, by its number or as -1: it reads what the spare holds and
writes nothing else. What the spare holds after a scatter with several padding rows is not specified.
``store_rows``, the same move for K/V, is in ``lane_attention``; there the padding rows name slot 0, SGLang's sink.
"""

from __future__ import annotations

from torch import Tensor


def gather_rows(bank: Tensor, index: Tensor) -> Tensor:
    """``bank[index]``; bank ``[capacity + 1, H]``, index int64 ``[rows]`` without repeats but the spare row."""
    return bank[index]


def scatter_rows(values: Tensor, index: Tensor, bank: Tensor) -> None:
    """``bank[index] = values``; values ``[rows, H]``, cast to the bank's dtype."""
    bank[index] = values.to(bank.dtype)
