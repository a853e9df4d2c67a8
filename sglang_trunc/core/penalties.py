"""Penalties of one request, for logits that stand behind drafted tokens.

Frequency, presence and repetition penalty and ``min_new_tokens`` depend on the tokens that a request has emitted. In a
speculative round a row also stands behind the tokens of its own path, so every row is treated as if its request had
emitted them. First in the order of the transforms of a readout; grammar mask and ``logit_bias`` come after.

The arithmetic is that of SGLang's plain decoding, bit for bit, but only where a token has occurred: elsewhere SGLang
adds 0 and divides by 1, which changes no value. Per row:

1. ``x + additive``: 0 less the cumulated frequency penalty, less the presence penalty; -inf for the stop ids of an
   output shorter than ``min_new_tokens``;
2. ``x * r`` where that is negative, ``x / r`` elsewhere, for repetition penalty r.

The frequency penalty is cumulated by one float32 addition an occurrence, so k occurrences do not cost k times it.
The prompt does not count.

Source: SGLang 0.5.23, ``sampling/penaltylib`` and ``SamplingBatchInfo.update_penalties``, ``apply_logits_bias``.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Scale = Callable[[Tensor, Tensor], object]


class PenaltyRule(NamedTuple):
    """What a request asks for; the defaults change nothing."""

    frequency: float = 0.0  # -2 to 2, off a logit for each occurrence
    presence: float = 0.0  # -2 to 2, off a logit once
    repetition: float = 1.0  # above 0, up to 2
    min_new_tokens: int = 0  # tokens before any of stop_ids
    stop_ids: tuple[int, ...] = ()

    @property
    def active(self) -> bool:
        """Whether any logit can change."""
        return self.depends_on_tokens or (self.min_new_tokens > 0 and bool(self.stop_ids))

    @property
    def depends_on_tokens(self) -> bool:
        """Whether it matters which tokens were emitted, not only how many."""
        return self.frequency != 0 or self.presence != 0 or self.repetition != 1


def scale_in_place(logits: Tensor, penalties: Tensor) -> None:
    """Repetition penalty as torch computes it eagerly; float32, ``penalties`` broadcasts over ``logits``."""
    torch.where(logits < 0, logits * penalties, logits / penalties, out=logits)


class Penalties:
    """One request's penalties and what they depend on."""

    def __init__(self, rule: PenaltyRule, output: Sequence[int] = (), scale: Scale = scale_in_place):
        """``output``: tokens emitted so far. ``scale``: the repetition penalty, in place, element by element.

        SGLang compiles its own, ``apply_scaling_penalties``. On a GPU the compiler's division is not correctly rounded;
        whoever needs SGLang's bits there passes that function.
        """
        self.rule = rule
        self.length = 0
        self._scale = scale
        self._place: dict[int, int] = {}  # token: its place in the lists below, in order of first occurrence
        self._tokens = array("q")
        self._counts: list[int] = []
        self._additive = array("f")
        self._frequency_sum = 0.0  # of the largest count in the table
        self._additive_by_count = [0.0]
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for token in output:
            self.advance(token)

    def advance(self, token: int) -> None:
        """The request has emitted one more token."""
        self.length += 1
        if not self.rule.depends_on_tokens:
            return
        self._on_device.clear()
        place = self._place.setdefault(token, len(self._tokens))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0)
            self._additive.append(0.0)
        self._counts[place] += 1
        self._additive[place] = self._additive_after(self._counts[place])

    def apply(self, logits: Tensor, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Penalise rows in place.

        ``logits`` float32 [n, vocabulary], on any device. Row ``rows[i]``, each at most once, is treated as if the
        request had emitted ``paths[i]`` after its output. All tokens lie inside the vocabulary.
        """
        wanted = self.rule.min_new_tokens - self.length
        self._forbid_stops(logits, [row for row, path in zip(rows, paths, strict=True) if len(path) < wanted])
        if self.rule.depends_on_tokens:
            self._penalise(logits, rows, paths)

    def dense(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Additive and scaling penalties as SGLang accumulates them over the output: float32 [vocabulary], on CPU."""
        additive, scaling = torch.zeros(1, vocabulary), torch.ones(vocabulary)
        if self._tokens:
            tokens, values = self._occurred(additive.device)
            additive[0, tokens] = values
            scaling[tokens] = self.rule.repetition
        if self.length < self.rule.min_new_tokens:
            self._forbid_stops(additive, [0])
        return additive[0], scaling

    def _forbid_stops(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Add -inf to the stop ids; a tokenizer may know some that the model's vocabulary lacks."""
        vocabulary = logits.shape[1]
        stops = [token for token in self.rule.stop_ids if token < vocabulary]
        places = array("q", [row * vocabulary + token for row in rows for token in stops])
        if places:
            at = _tensor(places).to(logits.device)
            logits.put_(at, torch.full_like(at, -torch.inf, dtype=logits.dtype), accumulate=True)

    def _penalise(self, logits: Tensor, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """The parts that depend on which tokens occurred, for all rows at once."""
        at, additive = self._affected(logits, rows, paths)
        if not len(at):
            return
        values = logits.take(at)
        values += additive
        if self.rule.repetition != 1:
            # A tensor of the device: CUDA divides by a number of the host by multiplying with its reciprocal.
            self._scale(values, torch.full_like(values, self.rule.repetition))
        logits.put_(at, values)

    def _affected(self, logits: Tensor, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Flat places of all logits whose token has occurred, int64 [m], and the additive part of each, float32 [m]."""
        device, vocabulary = logits.device, logits.shape[1]
        known = len(self._tokens)
        starts = array("q", [row * vocabulary for row in rows])
        changed, changed_additive = array("q"), array("f")  # tokens of the output that occur on the path again
        new, new_additive = array("q"), array("f")  # tokens of the path alone
        for index, path in enumerate(paths):
            for token, times in Counter(path).items():
                place = self._place.get(token)
                if place is None:
                    new.append(starts[index] + token)
                    new_additive.append(self._additive_after(times))
                else:
                    changed.append(index * known + place)
                    changed_additive.append(self._additive_after(self._counts[place] + times))
        if not known:
            return _tensor(new).to(device), _tensor(new_additive).to(device)
        # Two copies to the device a call, however many rows.
        integers = _tensor(new + starts + changed).to(device)
        numbers = _tensor(new_additive + changed_additive).to(device)
        tokens, base = self._occurred(device)
        first, last = len(new), len(new) + len(starts)
        at = torch.cat(((integers[first:last].unsqueeze(1) + tokens).view(-1), integers[:first]))
        additive = torch.cat((*[base] * len(rows), numbers[:first]))
        if changed:
            additive.scatter_(0, integers[last:], numbers[first:])
        return at, additive

    def _occurred(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens of the output, int64 [k], at least one, and the additive part of each, float32 [k]."""
        if device not in self._on_device:
            kept = _tensor(self._tokens), _tensor(self._additive)
            self._on_device[device] = kept[0].to(device, copy=True), kept[1].to(device, copy=True)
        return self._on_device[device]

    def _additive_after(self, occurrences: int) -> float:
        """Additive part for a token with so many occurrences; a float32 value."""
        table = self._additive_by_count
        while len(table) <= occurrences:
            self._frequency_sum = _float32(self._frequency_sum + _float32(self.rule.frequency))
            table.append(_float32(0.0 - self._frequency_sum - _float32(self.rule.presence)))
        return table[occurrences]


def _float32(number: float) -> float:
    """Rounded to float32. The sum of two float32 numbers in double precision rounds to their float32 sum."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _tensor(numbers: array[int] | array[float]) -> Tensor:
    """On the array's own memory, which must not grow meanwhile. Several times faster than from a list."""
    dtype = torch.int64 if numbers.typecode == "q" else torch.float32
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
