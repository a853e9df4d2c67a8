"""Which column of (seed, position) has a given hash: MurmurHash3 backwards, to reach the rare ends of the noise."""

from __future__ import annotations

import struct

WORD = 1 << 32
FIRST, SECOND, ADD = 0xCC9E2D51, 0x1B873593, 0xE6546B64


def rotate(word: int, count: int) -> int:
    """A 32-bit word rotated left."""
    return (word << count | word >> (32 - count)) % WORD


def column_with_hash(seed: int, position: int, value: int) -> int:
    """The column below 2**32 whose hash is ``value``; there is exactly one."""
    state = 0
    for (word,) in struct.iter_unpack("<I", struct.pack("<QI", seed % 2**64, position % WORD)):
        word = rotate(word * FIRST % WORD, 15) * SECOND % WORD
        state = (rotate(state ^ word, 13) * 5 + ADD) % WORD
    value ^= value >> 16
    value = value * pow(0xC2B2AE35, -1, WORD) % WORD
    value ^= value >> 13 ^ value >> 26
    value = value * pow(0x85EBCA6B, -1, WORD) % WORD
    value ^= value >> 16 ^ 16
    word = rotate((value - ADD) * pow(5, -1, WORD) % WORD, 19) ^ state
    return rotate(word * pow(SECOND, -1, WORD) % WORD, 17) * pow(FIRST, -1, WORD) % WORD
