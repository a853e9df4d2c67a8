"""What answers say of themselves, through SGLang's own streamer and tokenizer manager; and ``/server_info``."""

from __future__ import annotations

import types
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle
from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_trunc.core.counters import Counters
from sglang_trunc.core.options import SingleOptions, TruncOptions
from sglang_trunc.engine import reporting
from sglang_trunc.engine.reporting import KEY, add_counters, report_to_client
from tests.engine import sampling_stand
from tests.engine.worker_stand import BRANCHES, Client, decode, scripted_worker

pytestmark = pytest.mark.usefixtures("sglang_context")
EXACT, RELAXED = TruncOptions(1, 4, 0.0), TruncOptions(1, 4, 0.0, relax_top=3, relax_tau=0.25)


def streamed(rid: str, options: Any = EXACT, stream: bool = True, **sampling: Any) -> MagicMock:
    """A new request that the streamer will send piece by piece; what it asks of one beside that does not matter."""
    req = MagicMock(
        rid=rid,
        stream=stream,
        beam_group=None,
        output_ids=[],
        finished_len=None,
        finished_reason=None,
        finished_output=False,
        customized_info=None,
        send_token_offset=0,
        send_decode_id_offset=0,
        weight_version_events=[],
        sampling_params=sampling_stand.request(rid, [1], **sampling).sampling_params,
    )
    req.finished.return_value = req.check_match_stop_str_prefix.return_value = False
    req.get_mm_token_counts.return_value = (0, 0, 0)
    req.init_incremental_detokenize.return_value = ([], 0)
    report_to_client(req, options)
    return req


def emit(req: MagicMock, count: int, finished: bool = False) -> MagicMock:
    req.output_ids = req.output_ids_through_stop = req.output_ids + [7] * count
    req.finished.return_value = finished
    return req


class FrontEnd:
    """The tokenizer manager's side: what it knows of every request."""

    def __init__(self) -> None:
        self.manager = TokenizerManager.__new__(TokenizerManager)
        self.states: dict[str, Any] = {}

    def receive(self, *reqs: MagicMock) -> dict[str, dict]:
        """One batch of the streamer's: ``meta_info`` of the requests that are in it."""
        sent = _GenerationStreamAccumulator(
            return_logprob=False,
            return_hidden_states=False,
            return_routed_experts=False,
            return_indexer_topk=False,
            spec_algorithm=types.SimpleNamespace(is_none=lambda: True),
            disaggregation_mode=DisaggregationMode.NULL,
            default_stream_interval=1,
            default_force_stream_interval=50,
            get_cached_tokens_details=lambda req: None,
            is_request_level_customized_info_key=lambda key: False,
            current_weight_version=None,
        )
        for req in reqs:
            sent.accept(req=req)
        found: dict[str, dict] = {rid: {} for rid in sent.rids}
        info = unwrap_from_pickle(wrap_as_pickle(sent.customized_info)) if sent.customized_info else None
        for index, rid in enumerate(sent.rids if info is not None else ()):
            state = self.states.setdefault(
                rid, types.SimpleNamespace(customized_info_accumulated={}, customized_info_reported_keys=set())
            )
            self.manager.update_request_meta_info(found[rid], state, info, index, sent.finished_reasons[index])
        return found


def test_a_sampled_answer_names_its_seed():
    req = streamed("r", stream=False, temperature=0.7, sampling_seed=2**53 - 1)
    front = FrontEnd()
    assert front.receive(emit(req, 3)) == {}
    assert front.receive(emit(req, 4, finished=True)) == {"r": {"sampling_seed": 2**53 - 1}}


def test_every_part_of_a_stream_names_it():
    """Whole, whatever the number of tokens in a part; the first part may be all that a client reads."""
    req, front = streamed("r", temperature=0.7, sampling_seed=-4), FrontEnd()
    for count in (1, 5, 2, 4):
        assert front.receive(emit(req, count)) == {"r": {"sampling_seed": -4}}
    assert front.receive(emit(req, 1, finished=True)) == {"r": {"sampling_seed": -4}}
    assert front.states["r"].customized_info_accumulated == {}  # nothing that is cut by tokens


def test_a_greedy_answer_says_nothing():
    req = streamed("r")
    assert req.customized_info is None
    assert FrontEnd().receive(emit(req, 2)) == {"r": {}}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_in_a_mixed_batch_everybody_gets_their_own(order):
    reqs = [
        streamed("greedy"),
        streamed("one", temperature=0.7, sampling_seed=1),
        streamed("two", temperature=0.7, sampling_seed=2),
    ]
    front = FrontEnd()
    for count in (1, 3):
        found = front.receive(*(emit(reqs[index], count + index) for index in order))
        assert found == {"greedy": {}, "one": {"sampling_seed": 1}, "two": {"sampling_seed": 2}}


def test_other_peoples_information_stays_as_it_is():
    """One value a token, accumulated and cut by SGLang."""
    req, plain = streamed("r", temperature=0.7, sampling_seed=1), streamed("plain")
    req.customized_info["entropy"] = [0.1, 0.2, 0.3]
    plain.customized_info = {"entropy": [0.5, 0.6]}
    front = FrontEnd()
    found = front.receive(emit(req, 1), emit(plain, 1))
    assert found == {"r": {"entropy": [0.1], "sampling_seed": 1}, "plain": {"entropy": [0.5]}}
    found = front.receive(emit(plain, 1), emit(req, 2))
    assert found == {"r": {"entropy": [0.1, 0.2, 0.3], "sampling_seed": 1}, "plain": {"entropy": [0.5, 0.6]}}
    assert front.states["r"].customized_info_accumulated == {"entropy": [0.1, 0.2, 0.3]}


def test_what_a_request_brought_along_is_kept():
    req = sampling_stand.request("r", [1], temperature=1.0, sampling_seed=5)
    req.customized_info = {"entropy": []}
    report_to_client(req, EXACT)
    assert req.customized_info == {"entropy": [], KEY: [{"sampling_seed": 5}]}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "sampling_seed": 1}])
def test_relaxed_acceptance_is_marked_on_every_answer(sampling):
    req, front = streamed("r", RELAXED, **sampling), FrontEnd()
    for count in (1, 4):
        (said,) = front.receive(emit(req, count)).values()
        assert said.pop("relaxed_acceptance") == {"top": 3, "tau": 0.25}
        assert said == ({"sampling_seed": 1} if sampling else {})


def test_a_value_for_every_part_is_only_sliced_whole():
    value = reporting.EveryChunk([1, 2])
    assert (value[5:9], value[1], type(value[:0])) == ([1, 2], 2, list)


# /server_info.


def controller(worker: Any, algorithm: str) -> Any:
    scheduler = types.SimpleNamespace(spec_algorithm=types.SimpleNamespace(name=algorithm), draft_worker=worker)
    return types.SimpleNamespace(scheduler=scheduler)


def test_a_server_of_another_algorithm_says_nothing():
    state: dict[str, Any] = {}
    add_counters(None, controller(None, "EAGLE"), state)
    assert state == {}


def test_truncs_counters():
    counters = Counters()
    counters.rounds = 3
    worker = types.SimpleNamespace(
        options=RELAXED,
        counters=counters,
        cost=None,
        stopwatch=None,
        model=types.SimpleNamespace(shape=types.SimpleNamespace(recurrences=4)),
    )
    state: dict[str, Any] = {}
    add_counters(None, controller(worker, "TRUNC"), state)
    said = state[KEY]
    assert said["options"]["relax_tau"] == 0.25
    assert said["options"]["sampling_policy"] == "seeded"
    assert (said["recurrences"], said["counters"]["rounds"], said["cost"], said["seconds"]) == (4, 3, None, None)
    assert "lanes" not in said


def test_lanes_and_branch_slots_are_of_now():
    worker, client = scripted_worker(), Client(1)
    worker.cost = None
    state: dict[str, Any] = {}
    add_counters(None, controller(worker, "LOOPSPEC_DUAL"), state)
    assert state[KEY]["lanes"] == {"live": 0, "branch_slots_free": len(BRANCHES), "branch_slots": len(BRANCHES)}
    decode(worker, client)
    add_counters(None, controller(worker, "LOOPSPEC_DUAL"), state)
    lanes = worker.pipeline.lanes()
    assert len(lanes) > 2
    assert state[KEY]["lanes"]["live"] == len(lanes)
    assert SingleOptions.algorithm != worker.options.algorithm == "LOOPSPEC_DUAL"
