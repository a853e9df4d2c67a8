"""Every request option that can change an answer, as requests: what ``verify --options matrix`` and the tests send.

A case is made from a prompt's greedy continuation, so that its bans, stops and budgets touch what the model really
says. Two answers to the same case are equal where everything that a client sees of the text is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_trunc.serving.client import Completion
from sglang_trunc.serving.processors import ThinkingBudget, serialized

# What a server needs for all of the cases. A plain one also needs deterministic inference, for seeds, and no overlap
# scheduling: with it, stock penalizers and processors see the output of the step before.
SERVER_FLAGS = ("--enable-custom-logit-processor", "--enable-return-hidden-states")
PLAIN_FLAGS = ("--enable-deterministic-inference", "--disable-overlap-schedule")

_OBJECT = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 6}, "b": {"type": "boolean"}},
    "required": ["n", "s", "b"],
    "additionalProperties": False,
}
_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "json_schema", "json_schema": _OBJECT},
        "end": "</a>",
    },
}


@dataclass(frozen=True)
class Case:
    """One option, or one combination of them."""

    name: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)  # fields beside the sampling parameters
    stock: bool = True  # stock plain decoding can answer it
    ends: bool = False  # the option ends the answer itself, so end tokens are not ignored


def cases(greedy: Completion) -> list[Case]:
    """All of them for one prompt, whose plain greedy answer of 24 tokens or more this is."""
    said = greedy.output_ids
    seeded = {"temperature": 1.0, "sampling_seed": 20261130}
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.15}
    thinking = {"thinking_budget": 5, "think_start_id": said[3], "think_end_id": said[-1]}
    return [
        Case("greedy"),
        Case("temperature 0.7", {**seeded, "temperature": 0.7}),
        Case("temperature 1", seeded),
        Case("top_p 0.7", {**seeded, "top_p": 0.7}),
        Case("top_p 0.95", {**seeded, "top_p": 0.95}),
        Case("top_k", {**seeded, "top_k": 20}),
        Case("min_p", {**seeded, "min_p": 0.05}, stock=False),
        Case("top_k, top_p, temperature", {**seeded, "temperature": 0.8, "top_k": 50, "top_p": 0.9}),
        Case("repetition_penalty", {"repetition_penalty": 1.3}),
        Case("frequency_penalty", {"frequency_penalty": 0.9}),
        Case("presence_penalty", {"presence_penalty": 0.9}),
        Case("negative penalties", {"frequency_penalty": -0.5, "presence_penalty": -0.5}),
        Case("all penalties, sampled", {**penalties, **seeded, "top_p": 0.9}),
        Case("min_new_tokens", {"min_new_tokens": 12, "stop_token_ids": said[2:10]}, ends=True),
        Case("logit_bias", {"logit_bias": {str(said[1]): -100.0, str(said[4]): 2.0}}),
        Case("json_schema", {"json_schema": json.dumps(_OBJECT)}, ends=True),
        Case("json_schema, sampled", {"json_schema": json.dumps(_OBJECT), **seeded}, ends=True),
        Case("regex", {"regex": "[a-f]{2,8}=[0-9]{1,4}"}, ends=True),
        Case("ebnf", {"ebnf": 'root ::= "x" [a-d]{1,9} ("." | "!")'}, ends=True),
        Case("structural_tag", {"structural_tag": json.dumps(_TAG)}, ends=True),
        Case("stop string", {"stop": [greedy.text[5:7]]}, ends=True),
        Case("stop_regex", {"stop_regex": ["[aeiou]."]}, ends=True),
        Case("stop_token_ids", {"stop_token_ids": [said[15]]}, ends=True),
        Case("n", {**seeded, "n": 2}),
        Case("logprobs", request={"return_logprob": True, "top_logprobs_num": 4, "token_ids_logprob": said[:3]}),
        Case("logprobs, sampled", seeded, {"return_logprob": True, "top_logprobs_num": 4}),
        Case("return_hidden_states", request={"return_hidden_states": True}),
        Case("thinking budget", {"custom_params": thinking}, {"custom_logit_processor": serialized(ThinkingBudget)}),
    ]


def body(case: Case, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """The request of a case: JSON of SGLang's ``/generate``."""
    base = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": not case.ends}
    return {"input_ids": list(prompt), "sampling_params": {**base, **case.sampling}, **case.request}


def visible(answer: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a client sees of an answer's text: one entry for each of its ``n``."""
    answers = [answer] if isinstance(answer, Mapping) else answer
    return [_visible(one) for one in answers]


def _visible(answer: Mapping[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    names = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "hidden_states")
    seen = {name: meta[name] for name in names if meta.get(name) is not None}
    counts = {name: meta[name] for name in ("prompt_tokens", "completion_tokens")}
    return {
        "output_ids": answer["output_ids"],
        "text": answer["text"],
        "finish": meta["finish_reason"],
        **counts,
        **seen,
    }


def first_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str | None:
    """Where two answers to a case differ, in words; None if they are equal."""
    if len(one) != len(other):
        return f"{len(one)} answers against {len(other)}"
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        for name in [*left, *(right.keys() - left.keys())]:
            if left.get(name) != right.get(name):
                return f"{name} of answer {index}{_place(left.get(name), right.get(name))}"
    return None


def _place(left: Any, right: Any) -> str:
    if not (isinstance(left, list) and isinstance(right, list)):
        return f": {left!r} against {right!r}"
    place = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return f" at token {place}"
