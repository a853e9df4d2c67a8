from __future__ import annotations

import pytest

from sglang_trunc.core.id_bank import IdBank


def test_a_bank_gives_every_number_once():
    bank = IdBank([7, 3, 5])
    assert (bank.size, bank.free) == (3, 3)
    assert [bank.take() for _ in range(3)] == [7, 3, 5]
    assert (bank.size, bank.free) == (3, 0)
    with pytest.raises(IndexError):
        bank.take()


def test_what_came_back_last_goes_out_first():
    bank = IdBank(range(4))
    for number in (bank.take(), bank.take()):
        bank.give(number)
    assert [bank.take() for _ in range(4)] == [1, 0, 2, 3]


def test_a_number_may_come_back_as_another():
    bank = IdBank([1])
    bank.take()
    bank.give(9)
    assert (bank.size, bank.free, bank.take()) == (1, 1, 9)


def test_the_same_number_twice_is_an_error():
    with pytest.raises(ValueError, match="distinct"):
        IdBank([1, 2, 1])
    bank = IdBank([1, 2])
    with pytest.raises(ValueError, match="2 is free already"):
        bank.give(2)
    number = bank.take()
    bank.give(number)
    with pytest.raises(ValueError, match="free already"):
        bank.give(number)
    assert bank.free == 2
