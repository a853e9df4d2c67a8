"""Two decoders, or two imported records, side by side.

Comparable means: one target, one prompt, one number of new tokens, and, where they are run here, one seed. The texts
need not match: decoders consume different numbers of draws. Compare laws over many seeds, never strings of one.

Queries and calls were counted where they happened. Batches are hypothetical, the passes of an engine that widens each
round (target) or each level (draft) into one. Neither is a wall-clock time, and no speedup follows from them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_trunc.core.contract.decode import Decoder, SeededUniforms
from sglang_trunc.core.contract.readout import Context, LoopedModel, Readout


class ExperimentRecord(NamedTuple):
    """One run; ``_asdict`` is JSON-ready."""

    target_id: str  # which target: checkpoint and depth, by whatever name its owner uses
    prompt: Context
    continuation: Context
    rounds: int
    target_queries: int  # actual
    target_calls: int  # actual
    draft_queries: int  # actual
    draft_calls: int  # actual
    target_batches: int  # hypothetical
    draft_batches: int  # hypothetical


class Comparison(NamedTuple):
    baseline: ExperimentRecord
    candidate: ExperimentRecord


def compare_decoding(
    baseline: Decoder,
    candidate: Decoder,
    model: LoopedModel,
    target_id: str,
    prompt: Context,
    new_tokens: int,
    seed: int,
) -> Comparison:
    """Run both on ``model`` at its full depth: same prompt, same seed, exactly ``new_tokens`` tokens each.

    The providers, ``model`` and the decoders' drafts, must be pure functions of the context; whoever owns a stateful
    one resets it. ``ValueError``: a negative budget, or a decoder that returns another number of tokens.
    """
    if new_tokens < 0:
        raise ValueError(f"new_tokens = {new_tokens} is negative")
    records = []
    for name, decoder in (("baseline", baseline), ("candidate", candidate)):
        target = Readout(model, model.recurrences)
        run = decoder.decode(target, tuple(prompt), new_tokens, SeededUniforms(seed))
        if len(run.tokens) != new_tokens:
            raise ValueError(f"the {name} decoder returned {len(run.tokens)} tokens, expected exactly {new_tokens}")
        counts = (*target.counts, *run.draft, run.target_batches, run.draft_batches)
        records.append(ExperimentRecord(target_id, tuple(prompt), run.tokens, run.rounds, *counts))
    return compare_records(*records)


def compare_records(baseline: ExperimentRecord, candidate: ExperimentRecord) -> Comparison:
    """Pair two records; ``ValueError`` unless target id, prompt and continuation length match."""
    if baseline.target_id != candidate.target_id:
        raise ValueError(f"records of two targets, {baseline.target_id!r} and {candidate.target_id!r}")
    if baseline.prompt != candidate.prompt:
        raise ValueError(f"records of two prompts, {list(baseline.prompt)} and {list(candidate.prompt)}")
    lengths = len(baseline.continuation), len(candidate.continuation)
    if lengths[0] != lengths[1]:
        raise ValueError(f"records of two continuation lengths, {lengths[0]} and {lengths[1]}")
    return Comparison(baseline, candidate)


def parse_record(record: Mapping[str, Any]) -> ExperimentRecord:
    """A record from JSON. ``ValueError`` names missing and unknown keys, and values of the wrong kind."""
    known = ExperimentRecord._fields
    missing = [key for key in known if key not in record]
    unknown = sorted(set(record) - set(known))
    if missing or unknown:
        raise ValueError(f"an experiment record has the keys {', '.join(known)}; missing {missing}, unknown {unknown}")
    if not isinstance(record["target_id"], str):
        raise ValueError(f"target_id = {record['target_id']!r} is not a string")
    prompt, continuation = (_token_ids(key, record[key]) for key in ("prompt", "continuation"))
    counts = (_count(key, record[key]) for key in known[3:])
    return ExperimentRecord(record["target_id"], prompt, continuation, *counts)


def _token_ids(key: str, value: Any) -> Context:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{key} = {value!r} is not a list of token ids")
    return tuple(_count(f"{key}[{at}]", token) for at, token in enumerate(value))


def _count(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} = {value!r} is not an integer from 0 on")
    return value
