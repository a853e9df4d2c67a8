"""What answers say of themselves, through SGLang's own streamer and tokenizer manager; and ``/server_info``."""

from __future__ import annotations

import types
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle
from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_trunc.core.counters import Counters
from sglang_trunc.core.lane_tree import LOOKUP
from sglang_trunc.core.options import DualOptions, SingleOptions, TruncOptions
from sglang_trunc.core.pipeline_round import PipelineRun
from sglang_trunc.core.trunc import Run
from sglang_trunc.engine import reporting
from sglang_trunc.engine.reporting import KEY, add_counters, report_to_client
from tests.engine import sampling_stand
from tests.engine.markov_stand import Tables, TableServer
from tests.engine.worker_stand import BRANCHES, Client, decode, scripted_worker

pytestmark = pytest.mark.usefixtures("sglang_context")
EXACT, RELAXED = TruncOptions(1, 4, 0.0), TruncOptions(1, 4, 0.0, relax_top=3, relax_tau=0.25)
NOTHING = {
    "tokens": 0,
    "drafts_accepted": {"d1": 0},
    "restarts": 0,
    "full_passes": 0.0,
    "tokens_per_full_pass": None,
}


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
    """The tokenizer manager's side: what it knows of every request. ``accounts``: the last of each."""

    def __init__(self) -> None:
        self.accounts: dict[str, dict] = {}
        self.manager = TokenizerManager.__new__(TokenizerManager)
        self.states: dict[str, Any] = {}

    def receive(self, *reqs: MagicMock) -> dict[str, dict]:
        """One batch of the streamer's: ``meta_info`` of the requests that are in it, but for their accounts."""
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
            if reporting.ACCOUNT in found[rid]:
                self.accounts[rid] = found[rid].pop(reporting.ACCOUNT)
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


def test_a_greedy_answer_says_nothing_but_its_account():
    req, front = streamed("r"), FrontEnd()
    assert front.receive(emit(req, 2)) == {"r": {}}
    assert front.accounts == {"r": NOTHING}


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
    assert set(req.customized_info) == {"entropy", KEY}
    assert req.customized_info[KEY][0:0] == [{"sampling_seed": 5, "trunc": NOTHING}]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "sampling_seed": 1}])
def test_relaxed_acceptance_is_marked_on_every_answer(sampling):
    req, front = streamed("r", RELAXED, **sampling), FrontEnd()
    for count in (1, 4):
        (said,) = front.receive(emit(req, count)).values()
        assert said.pop("relaxed_acceptance") == {"top": 3, "tau": 0.25}
        assert said == ({"sampling_seed": 1} if sampling else {})


# Accounts, from the workers' rounds to the client.


def chains(*rounds: tuple[MagicMock, list[int]]) -> tuple[Any, Run]:
    """A TRUNC round that gives these requests these runs, as the worker has them."""
    width = max(len(run) for _, run in rounds)
    tokens = torch.tensor([run + [0] * (width - len(run)) for _, run in rounds])
    lengths = torch.tensor([len(run) for _, run in rounds])
    committed = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req, _ in rounds]
    batch = types.SimpleNamespace(reqs=[req for req, _ in rounds], seq_lens=torch.tensor(committed))
    return batch, Run(tokens, lengths, torch.empty(0), None)  # type: ignore[arg-type]


def answer(rid: str, options: Any = EXACT, **more: Any) -> MagicMock:
    """A request that has its first token, from its prefill."""
    req = streamed(rid, options, **more)
    req.origin_input_ids = [1, 2, 3]
    return emit(req, 1)


def settled(req: MagicMock, tokens: int) -> dict:
    """What a part that ends so would say."""
    (said,) = req.customized_info[KEY][0:tokens]
    return said["trunc"]


def test_a_trunc_round_is_told_to_clients_by_and_by():
    """Two streams side by side; one is stopped in the middle of its second run."""
    one, other, front = answer("one"), answer("other"), FrontEnd()
    front.receive(one, other)
    assert front.accounts == {"one": NOTHING, "other": NOTHING}
    counters = Counters(round_ticks=7)
    reporting.note_chains(*chains((one, [7, 7, 7]), (other, [7])), (), 1, 4, counters)
    front.receive(emit(one, 3), emit(other, 1))
    assert front.accounts["one"] == {
        "tokens": 3,
        "drafts_accepted": {"d1": 2},
        "restarts": 1,
        "full_passes": 1.75,
        "tokens_per_full_pass": 3 / 1.75,
    }
    assert front.accounts["other"]["tokens_per_full_pass"] == 1 / 1.75
    reporting.note_chains(*chains((one, [7, 7, 7, 7]), (other, [7, 7])), (), 1, 4, counters)
    front.receive(emit(one, 2, finished=True), emit(other, 2))
    assert front.accounts["one"]["drafts_accepted"] == {"d1": 4}
    assert (front.accounts["one"]["tokens"], front.accounts["one"]["restarts"]) == (5, 1)
    assert front.accounts["other"]["tokens"] == 3
    assert front.accounts["other"]["full_passes"] == 3.5


def test_a_request_that_is_not_streamed_is_told_at_its_end():
    req, front = answer("r", stream=False), FrontEnd()
    for _ in range(2):
        reporting.note_chains(*chains((req, [7, 7])), (), 1, 4, Counters(round_ticks=7))
        assert front.receive(emit(req, 2)) == {}
    assert front.receive(emit(req, 0, finished=True)) == {"r": {}}
    assert front.accounts["r"]["drafts_accepted"] == {"d1": 2}


def test_lookups_have_an_account_of_their_own_and_a_total():
    req = answer("r", TruncOptions(1, 4, 0.0, lookup=2))
    counters = Counters(round_ticks=4)
    reporting.note_chains(*chains((req, [7, 7, 7])), [[7, 5]], 1, 4, counters)
    assert settled(req, 4)["drafts_accepted"] == {"d1": 1, "lookup": 1}
    assert counters.looked_up_accepted == 1


def test_a_round_under_overlap_scheduling_is_ahead_of_what_is_sent():
    req, front = answer("r"), FrontEnd()
    reporting.note_chains(*chains((req, [7, 7])), (), 1, 4, Counters(round_ticks=7))
    batch, run = chains((req, [7, 7, 7]))
    batch.seq_lens += 2
    reporting.note_chains(batch, run, (), 1, 4, Counters(round_ticks=7))
    front.receive(emit(req, 2))
    assert (front.accounts["r"]["tokens"], front.accounts["r"]["full_passes"]) == (2, 1.75)
    front.receive(emit(req, 3, finished=True))
    assert (front.accounts["r"]["tokens"], front.accounts["r"]["full_passes"]) == (5, 3.5)


def test_what_was_lost_to_a_retraction_is_not_told():
    """A round was under way; the prefill of the resumed request gives the token behind what had arrived."""
    req, front = answer("r"), FrontEnd()
    reporting.note_chains(*chains((req, [7, 7])), (), 1, 4, Counters(round_ticks=7))
    front.receive(emit(req, 2))
    batch, run = chains((req, [7, 7, 7]))
    reporting.note_chains(batch, run, (), 1, 4, Counters(round_ticks=7))
    reporting.note_prefill([req, MagicMock(customized_info=None)])
    front.receive(emit(req, 1))
    assert (front.accounts["r"]["tokens"], front.accounts["r"]["full_passes"]) == (2, 1.75)
    reporting.note_chains(*chains((req, [7])), (), 1, 4, Counters(round_ticks=7))
    front.receive(emit(req, 1, finished=True))
    assert (front.accounts["r"]["tokens"], front.accounts["r"]["restarts"]) == (3, 2)


def test_a_pipelines_runs_are_told():
    """One that did not take part has none, and one that admission does not know is left alone."""
    both = DualOptions(d1=1, d2=2, max_width=4, min_survival=0.0)
    req, still, stranger = answer("r", both), answer("still", both), types.SimpleNamespace(origin_input_ids=[1])
    runs = [PipelineRun([7, 7], sources=[2, 0], begin=4, ticks=4), PipelineRun([7]), PipelineRun([7], [], [1], 1, 4)]
    reporting.note_runs([req, still, stranger], runs, 4)
    assert settled(req, 3) == {
        "tokens": 2,
        "drafts_accepted": {"d1": 0, "d2": 1},
        "restarts": 1,
        "full_passes": 1.0,
        "tokens_per_full_pass": 2.0,
    }
    assert settled(still, 2)["tokens"] == 0


def served(options: Any) -> tuple[list[dict], Any]:
    """Six requests of a server of tables, until all have 20 tokens: their accounts and the totals."""
    reqs = [sampling_stand.request(f"r{row}", [1 + row % 3, 2], 21) for row in range(6)]
    for row, req in enumerate(reqs):
        req.customized_info = None
        report_to_client(req, options)
        req.output_ids = [1 + row]
    server = TableServer(Tables(12), options, reqs)
    server.run(20)
    emitted = [len(text) - 2 for text in server.texts]
    return [settled(req, count) for req, count in zip(reqs, emitted, strict=True)], server.worker.counters


def test_truncs_worker_tells_every_round():
    told, counters = served(TruncOptions(1, 5, 0.0, lookup=3, lookup_min_match=1))
    drafts = [one["drafts_accepted"] for one in told]
    assert sum(one["tokens"] for one in told) == counters.tokens >= 6 * 20
    assert sum(one["restarts"] for one in told) == counters.runs
    assert sum(one["lookup"] for one in drafts) == counters.looked_up_accepted > 0
    assert sum(one["d1"] for one in drafts) == counters.accepted - counters.looked_up_accepted > 0
    assert sum(one["full_passes"] for one in told) * 4 == counters.request_ticks
    assert len({one["tokens_per_full_pass"] for one in told}) > 1


def test_a_pipelines_worker_tells_every_round():
    options = DualOptions(d1=1, d2=2, max_width=12, min_survival=0.0, lookup=2, lookup_min_match=1)
    told, counters = served(options)
    assert [one["tokens"] for one in told] == [20] * 6
    for name, source in (("d1", 1), ("d2", 2), ("lookup", LOOKUP)):
        assert sum(one["drafts_accepted"][name] for one in told) == counters.accepted[source] > 0
    assert sum(one["restarts"] for one in told) == counters.restarts
    assert counters.ended == 6
    assert sum(one["full_passes"] for one in told) * 4 == counters.request_ticks


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
