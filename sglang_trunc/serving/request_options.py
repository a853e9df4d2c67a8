"""Every request option that can change an answer, as requests: what ``verify --options matrix`` and the tests send.

A case is made from a prompt's greedy continuation, so that its bans, stops and budgets touch what the model really
says. Two answers to the same case are equal where everything that a client sees of the text is (``visible``).

Stock plain decoding (SGLang 0.5.23) is no reference for all of them, for faults of its own:

* min-p with a seed ends its scheduler (``top_k_top_p_min_p_sampling_from_probs_torch`` asserts);
* without overlap scheduling it applies penalizers in the order of a ``set`` of classes, which changes from process to
  process: the repetition penalty before or after the additive ones (``BatchedPenalizerOrchestrator.apply``);
* with ``ignore_eos`` it emits one more, unconstrained token after a grammar has ended. A speculative schedule ends
  there; such cases are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_trunc.serving.client import Client, Completion
from sglang_trunc.serving.processors import ThinkingBudget, serialized

# What a server needs for all of the cases. A plain one also needs deterministic inference, for seeds, and no overlap
# scheduling: with it, stock penalizers and processors see the output of the step before.
SERVER_FLAGS = ("--enable-custom-logit-processor", "--enable-return-hidden-states")
PLAIN_FLAGS = ("--enable-deterministic-inference", "--disable-overlap-schedule")

GREEDY_TOKENS = 24  # of a greedy continuation that cases are made from
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "s": {"type": "string", "maxLength": 6},
        "b": {"type": "boolean"},
    },
    "required": ["n", "s", "b"],
    "additionalProperties": False,
}
_TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"},
}
IMPOSSIBLE = -3.4e38  # at or below it are the logprobs of forbidden tokens, which SGLang clamps to float32's lowest
_FLOATS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "hidden_states")


@dataclass(frozen=True)
class Case:
    """One option, or one combination of them."""

    name: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)  # fields beside the sampling parameters
    stock: bool = True  # stock plain decoding is a reference for it
    ends: bool = False  # the option ends the answer itself, so end tokens are not ignored

    @property
    def options(self) -> list[str]:
        """Names of the options, as a client spells them."""
        return [*self.sampling, *self.request]

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; otherwise the best one is taken."""
        return self.sampling.get("temperature", 0) > 0 and self.sampling.get("top_k") != 1

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn with noise that goes by rank, not by token id."""
        return self.draws and any(name in self.sampling for name in ("top_k", "top_p", "min_p"))


def cases(prompt: Sequence[int], greedy: Completion) -> list[Case]:
    """All of them for one prompt.

    ``greedy``: its greedy answer, end tokens ignored; ValueError below ``GREEDY_TOKENS`` tokens.
    """
    if len(greedy.output_ids) < GREEDY_TOKENS:
        raise ValueError(f"cases need {GREEDY_TOKENS} tokens of greedy text, got {len(greedy.output_ids)}")
    said = greedy.output_ids[:GREEDY_TOKENS]
    changes = _logit_changes(said, _thinking(prompt, said))
    return [*_draws(), *_penalties(), *changes, *_grammars(), *_stops(greedy.text, said), *_reports(said)]


_SEEDED = {"temperature": 1.0, "sampling_seed": 20261130}
_LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3}


def _draws() -> Iterator[Case]:
    yield Case("greedy")
    yield Case("greedy, to its own end", ends=True)
    yield Case("greedy by top_k 1", {**_SEEDED, "top_k": 1})
    yield Case("temperature 0.7", {**_SEEDED, "temperature": 0.7})
    yield Case("temperature 1", _SEEDED)
    yield Case("temperature 1, to its own end", {**_SEEDED, "sampling_seed": -7}, ends=True)
    yield Case("top_p 0.7", {**_SEEDED, "top_p": 0.7})
    yield Case("top_p 0.95", {**_SEEDED, "top_p": 0.95, "sampling_seed": 2**40 + 1})
    yield Case("top_k", {**_SEEDED, "top_k": 20})
    yield Case("min_p", {**_SEEDED, "min_p": 0.05}, stock=False)
    yield Case("top_k, top_p, temperature", {**_SEEDED, "temperature": 0.8, "top_k": 50, "top_p": 0.9})
    yield Case("n", {**_SEEDED, "n": 2})


def _penalties() -> Iterator[Case]:
    negative = {"frequency_penalty": -0.5, "presence_penalty": -0.5}
    all_three = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.15}
    yield Case("repetition_penalty", {"repetition_penalty": 1.3})
    yield Case("frequency_penalty", {"frequency_penalty": 0.9}, _LOGPROBS)
    yield Case("presence_penalty", {"presence_penalty": 0.9})
    yield Case("negative penalties", negative)
    yield Case("frequency, presence, sampled", {"frequency_penalty": 0.7, "presence_penalty": 0.4, **_SEEDED})
    yield Case("all penalties", {**negative, "repetition_penalty": 0.8}, stock=False)
    yield Case("all penalties, sampled", {**all_three, **_SEEDED, "top_p": 0.9}, stock=False)


def _thinking(prompt: Sequence[int], said: Sequence[int]) -> dict[str, int]:
    """Parameters of a budget that is used up five tokens into the answer, if the answer lets it."""
    place = max((i for i, token in enumerate(prompt) if token not in said), default=len(prompt) - 1)
    known = {*prompt, *said}
    unsaid = next(token for token in range(5, len(known) + 6) if token not in known)
    budget = len(prompt) - 1 - place + 5
    return {"thinking_budget": budget, "think_start_id": prompt[place], "think_end_id": unsaid}


def _logit_changes(said: Sequence[int], thinking: Mapping[str, int]) -> Iterator[Case]:
    processor = {"custom_logit_processor": serialized(ThinkingBudget)}
    bias = {"logit_bias": {str(said[1]): -100.0, str(said[4]): 2.0}}
    late = {"min_new_tokens": 12, "stop_token_ids": said[2:10]}
    yield Case("min_new_tokens", late, ends=True)
    yield Case("min_new_tokens, sampled", {**_SEEDED, **late}, ends=True)
    yield Case("logit_bias", bias)
    yield Case("custom_logit_processor", {"custom_params": thinking}, processor)
    yield Case(
        "all changes, sampled",
        {**_SEEDED, **late, **bias, "repetition_penalty": 1.15, "custom_params": thinking},
        {**processor, **_LOGPROBS},
        ends=True,
    )


def _grammars() -> Iterator[Case]:
    schema = {"json_schema": json.dumps(SCHEMA)}
    yield Case("json_schema", schema, ends=True)
    yield Case("json_schema, sampled", {**schema, **_SEEDED}, ends=True)
    yield Case("json_schema, penalty", {**schema, "repetition_penalty": 1.3}, _LOGPROBS, ends=True)
    yield Case("regex", {"regex": "[a-f]{2,8}=[0-9]{1,4}"}, ends=True)
    yield Case("regex, sampled", {"regex": "[a-f]{2,8}=[0-9]{1,4}", **_SEEDED, "top_p": 0.9}, _LOGPROBS, ends=True)
    yield Case("ebnf", {"ebnf": 'root ::= "x" [a-d]{1,9} ("." | "!")'}, ends=True)
    yield Case("structural_tag", {"structural_tag": json.dumps(_TAG)}, ends=True)


def _stops(text: str, said: Sequence[int]) -> Iterator[Case]:
    late, early = text[9:11] or "e", text[5:7] or "a"
    yield Case("stop string", {"stop": [late, early]}, ends=True)
    yield Case("stop string kept", {"stop": [early], "no_stop_trim": True, "skip_special_tokens": False}, ends=True)
    yield Case("stop_regex", {"stop_regex": ["[aeiou]."]}, ends=True)
    yield Case("stop_token_ids", {"stop_token_ids": [said[15]]}, ends=True)


def _reports(said: Sequence[int]) -> Iterator[Case]:
    wanted = {"return_logprob": True, "top_logprobs_num": 4, "token_ids_logprob": list(said[:3])}
    yield Case("logprobs", request=wanted)
    yield Case("logprobs, sampled", _SEEDED, wanted)
    yield Case("return_hidden_states", request={"return_hidden_states": True})
    yield Case("return_hidden_states, sampled", _SEEDED, {"return_hidden_states": True})


def body(case: Case, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """The request of a case: JSON of SGLang's ``/generate``."""
    base = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": not case.ends}
    return {"input_ids": list(prompt), "sampling_params": {**base, **case.sampling}, **case.request}


class OptionClient(Client):
    """Sends whole requests; answers are as the server writes them, one for each of a request's ``n``."""

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Raises ``RequestRefused``."""
        answer = self._checked(self._http.post("/generate", json=request)).json()
        return [answer] if isinstance(answer, dict) else list(answer)

    def ask_streamed(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The last event of each answer, which has all of it. Raises ``RequestRefused``."""
        last = {event.get("index", 0): event for event in self.stream(request)}
        return [last[index] for index in sorted(last)]


def visible(answers: Sequence[Mapping[str, Any]], values: bool = True) -> list[dict[str, Any]]:
    """What a client sees of the text of each answer.

    ``values`` False leaves out logprobs and hidden states, where two schedules may round differently.
    """
    return [_visible(answer, _FLOATS if values else ()) for answer in answers]


def _visible(answer: Mapping[str, Any], floats: Sequence[str]) -> dict[str, Any]:
    meta = answer["meta_info"]
    seen = {name: meta[name] for name in floats if meta.get(name) is not None}
    if "hidden_states" in seen:
        seen["hidden_states"] = _behind_tokens(seen["hidden_states"])
    if "output_top_logprobs" in seen:
        seen["output_top_logprobs"] = [_possible(best) for best in seen["output_top_logprobs"]]
    counts = {name: meta.get(name) for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens")}
    return {
        "output_ids": answer["output_ids"],
        "text": answer["text"],
        "finish": meta["finish_reason"],
        **counts,
        **seen,
    }


def _behind_tokens(states: Sequence[Any]) -> list[list[float]]:
    """The state that each token was chosen from. The first entry holds those of the whole prefill, whose length
    depends on what the prefix cache had."""
    return [entry[-1] if isinstance(entry[0], list) else entry for entry in states]


def _possible(best: Sequence[Any]) -> list[Any]:
    """Of the best tokens those that can come at all: which others are named depends on a sort of equal values."""
    return [entry for entry in best if entry[0] is not None and entry[0] > IMPOSSIBLE]


class Parting(NamedTuple):
    """Where two answers to a case differ first."""

    answer: int  # of its ``n``
    field: str  # of ``visible``
    place: int | None  # index, where the field is a list
    said: str  # both values, short

    def __str__(self) -> str:
        where = self.field if self.place is None else f"{self.field} at {self.place}"
        return f"{where} of answer {self.answer}: {self.said}"


def first_difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Parting | None:
    """``one``, ``other``: from ``visible``. None if they are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        for name in [*left, *(right.keys() - left.keys())]:
            if left.get(name) != right.get(name):
                return _parting(index, name, left.get(name), right.get(name))
    if len(one) != len(other):
        return Parting(min(len(one), len(other)), "answers", None, f"{len(one)} against {len(other)}")
    return None


def _parting(index: int, name: str, left: Any, right: Any) -> Parting:
    if not (isinstance(left, list) and isinstance(right, list)):
        return Parting(index, name, None, f"{_short(left)} against {_short(right)}")
    place = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    values = (_short(side[place]) if place < len(side) else "nothing" for side in (left, right))
    return Parting(index, name, place, " against ".join(values))


def _short(value: Any, most: int = 60) -> str:
    shown = repr(value)
    return shown if len(shown) <= most else shown[:most] + "..."
