"""Which path and position a row has for its chooser, and whose way of choosing it follows, in all that rounds do.

The workers' own rounds over a model that is a table (``markov_stand``), with every path checked. Lanes made by hand:
``test_lane_chooser``. Real models: ``test_sampled_text``.
"""

from __future__ import annotations

import json
import random
import types
from typing import Any

import pytest
import torch

from sglang_trunc.core import sampling
from sglang_trunc.core.looped import Nodes
from sglang_trunc.core.options import RESIDUAL, DualOptions, Options, SingleOptions, TruncOptions
from sglang_trunc.core.trunc import Readout
from sglang_trunc.engine import choosing
from sglang_trunc.engine.choosing import BatchChooser, ChainChooser, sampling_rows, seeds_of
from sglang_trunc.engine.outputs import Outputs
from tests.engine.markov_stand import FULL_DEPTH, Tables, TableServer
from tests.engine.sampling_stand import Mirror, emit, request, sampling_info, stock_choice

pytestmark = pytest.mark.usefixtures("sglang_context")
VOCABULARY = 30
WANTED = 16

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 9},
    {"frequency_penalty": 0.6, "min_new_tokens": 6, "stop_token_ids": list(range(0, VOCABULARY, 3))},
    {"temperature": 0.7, "repetition_penalty": 1.4, "logit_bias": {"4": 2.0}},
    {"temperature": 0.8, "processor": Mirror, "custom_params": {"boost": 2.0}},
]


@pytest.fixture(scope="module")
def tables() -> Tables:
    return Tables(VOCABULARY, seed=2, spread=0.4)


def requests() -> list[Any]:
    """One of each kind, in the middle of answers of different lengths."""
    rng = random.Random(5)
    reqs = []
    for number, kind in enumerate(KINDS):
        prompt = rng.choices(range(VOCABULARY), k=1 + 2 * number)
        reqs.append(request(f"request {number}", prompt, WANTED + 8, sampling_seed=17 * number, **kind))
        emit(reqs[-1], rng.choices(range(VOCABULARY), k=1 + number % 3))
    return reqs


def plain_texts(tables: Tables) -> list[list[int]]:
    """One token at a time, chosen by SGLang's own code."""
    reqs = requests()
    for _ in range(WANTED):
        for req in reqs:
            emit(req, [stock_choice(req, tables.at[FULL_DEPTH][req.output_ids[-1]])])
    return [req.output_ids[-WANTED:] for req in reqs]


def named(options: Options) -> str:
    return " ".join(map(str, [options.algorithm, *vars(options).values()]))


def run(tables: Tables, options: Options) -> tuple[list[list[int]], TableServer]:
    """Arrivals at different times, so that lanes stand at all depths beside each other."""
    server = TableServer(tables, options, requests(), check=True)
    return server.run(WANTED, waves=3), server


OPTIONS = [
    TruncOptions(1, 6, 0.0),
    TruncOptions(2, 4, 0.1),
    TruncOptions(4, 3, 0.0),
    TruncOptions(1, 6, 0.0, lookup=3, lookup_min_match=1),
    SingleOptions(1, 32, 0.0),
    SingleOptions(2, 9, 0.0),
    SingleOptions(1, 32, 0.0, lookup=2, lookup_min_match=1),
    DualOptions(1, 2, 32, 0.0),
    DualOptions(1, 3, 12, 0.05),
    DualOptions(1, 2, 32, 0.0, lookup=3, lookup_min_match=1),
    # Looked-up tokens that d1 would not choose go on, in chains and in trees.
    TruncOptions(1, 6, 0.0, lookup=3, lookup_min_match=1, screen_top=0),
    TruncOptions(1, 6, 0.0, lookup=3, lookup_min_match=1, screen_top=3),
    SingleOptions(1, 32, 0.0, lookup=4, lookup_min_match=1, lookup_candidates=2, screen_top=2),
    DualOptions(1, 2, 32, 0.0, lookup=5, lookup_min_match=1, lookup_candidates=3, screen_top=0),
]


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_texts_are_plain_decodings_and_every_path_is_right(tables, options):
    """Roots and deep lanes, behind one commit of the round and behind several, beside branches, in any order."""
    texts, server = run(tables, options)
    assert texts == plain_texts(tables)
    counters = server.worker.counters
    if isinstance(options, TruncOptions):
        assert counters.accepted > 20
    else:
        assert counters.tokens > 1.2 * counters.runs
        assert counters.restarts > 5
    if getattr(options, "d2", None):
        assert counters.accepted[options.d2] > 3  # a branch has won


@pytest.mark.parametrize("shortest", range(1, 9))
def test_matches_of_any_length_change_no_text(tables, shortest, tmp_path):
    """Nor does a corpus: of other texts, of this one's end and of tokens nobody has."""
    texts = plain_texts(tables)
    corpus = tmp_path / "corpus.jsonl"
    documents = [[3, 1, 2] * 9, [*texts[0], *texts[1]], texts[2][::-1]]
    corpus.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in documents))
    more = {"lookup_min_match": shortest, "lookup_corpus": str(corpus)}
    for options in (TruncOptions(1, 6, 0.0, lookup=4, **more), DualOptions(1, 2, 32, 0.0, lookup=4, **more)):
        assert run(tables, options)[0] == texts


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_every_path_is_right_under_the_residual_policy(tables, options):
    changed = types.SimpleNamespace(**{**vars(options), "sampling_policy": RESIDUAL})
    texts, server = run(tables, type(options)(**vars(changed)))
    greedy = [number for number, kind in enumerate(KINDS) if "temperature" not in kind]
    plain = plain_texts(tables)
    assert [texts[number] for number in greedy] == [plain[number] for number in greedy]
    cascade = getattr(server.worker, "_cascade", None)
    assert cascade is None or len(cascade.memory) <= cascade.memory.most


def test_a_chain_is_read_out_at_its_own_positions(tables):
    """Request order is the batch's; a row names its request by its place there."""
    reqs = [request("a", [1, 2, 3], temperature=1.0, sampling_seed=1), request("b", [4], temperature=1.0)]
    for req in reqs:
        emit(req, [7])
    chooser = BatchChooser(batch_of(reqs), torch.tensor([3, 1]), Outputs())
    own = ChainChooser(chooser, TruncOptions(1, 4, 0.0), 8)
    nodes = Nodes(torch.tensor([1, 0, 0]), torch.tensor([2, 0, 1]))
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    rows = chooser.rows(nodes.request, torch.tensor([3, 3, 4]))
    assert rows.seeds.tolist() == [0, 1, 1]
    chains = torch.zeros(2, 4, dtype=torch.int64)
    tokens = own(Readout(nodes, 1, logits.clone(), chains, None))
    assert tokens.tolist() == sampling.choose(logits, rows).tokens.tolist()


def batch_of(reqs: list[Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(reqs=reqs, sampling_info=sampling_info(reqs, VOCABULARY))


# Kinds of rows.


def test_a_kind_is_the_requests_own():
    reqs = [
        request("greedy", [1]),
        request("open", [1], temperature=0.5, sampling_seed=3),
        request("top-k", [1], temperature=1.0, top_k=5),
        request("top-p", [1], temperature=1.0, top_p=0.5),
        request("min-p", [1], temperature=1.0, min_p=0.1),
        request("greedy by top-k", [1], temperature=0.7, top_k=1, top_p=0.5),
    ]
    rows = sampling_rows(sampling_info(reqs, VOCABULARY), seeds_of(reqs, torch.device("cpu")), torch.arange(6))
    assert rows.greedy.tolist() == [True, False, False, False, False, True]
    assert rows.filtered.tolist() == [False, False, True, True, True, False]
    assert rows.seeds.tolist() == [0, 3, 0, 0, 0, 0]
    assert rows.temperatures.tolist() == pytest.approx([1.0, 0.5, 1.0, 1.0, 1.0, 0.7])
    assert (rows.all_greedy, rows.any_filtered, rows.any_open) == (False, True, True)


def test_greedy_requests_without_options_are_plain():
    greedy, sampled = request("greedy", [1]), request("sampled", [1], temperature=1.0)
    biased = request("biased", [1], logit_bias={"3": 1.0})
    for reqs, plain in (([greedy], True), ([greedy, sampled], False), ([greedy, biased], False)):
        for req in reqs:
            req.output_ids = [4]
        assert BatchChooser(batch_of(reqs), torch.tensor([1] * len(reqs)), Outputs()).plain is plain


@pytest.mark.parametrize("emitted", [[], [5, 7]])
@pytest.mark.parametrize("length", [2, 6])
def test_a_prefill_makes_the_records_that_its_lanes_need(emitted, length, caplog):
    """Also of requests that end inside their prompts with this chunk, and of those that are prefilled again."""
    req = request("r", [1] * 6, frequency_penalty=1.0)
    req.output_ids = list(emitted)
    outputs = Outputs()
    for _ in range(2):
        chooser = BatchChooser(batch_of([req]), torch.tensor([length - 1 + (length == 6) * len(emitted)]), outputs)
        assert outputs.of("r").tokens == emitted
        assert not chooser.plain
    assert not caplog.records


# Relaxed acceptance.


def test_switched_off_it_is_never_asked(tables, monkeypatch):
    monkeypatch.setattr(choosing, "relax", None)
    for options in (TruncOptions(1, 4, 0.0), DualOptions(1, 2, 16, 0.0)):
        assert run(tables, options)[0] == plain_texts(tables)


@pytest.mark.parametrize("options", [TruncOptions, SingleOptions, DualOptions])
def test_more_drafts_are_kept_and_sampled_texts_stay(options):
    tables = Tables(VOCABULARY, seed=2, spread=1.0)
    shape = {TruncOptions: (1, 5, 0.0), SingleOptions: (1, 40, 0.0), DualOptions: (1, 2, 40, 0.0)}[options]
    exact, exactly = run(tables, options(*shape))
    relaxed, server = run(tables, options(*shape, relax_top=8, relax_tau=0.05))
    greedy = {number for number, kind in enumerate(KINDS) if "temperature" not in kind}
    assert [number for number in range(len(KINDS)) if relaxed[number] != exact[number]] == sorted(greedy)
    assert kept(server) > kept(exactly)


def kept(server: TableServer) -> float:
    """Drafts kept of those that were made."""
    counters = server.worker.counters
    if isinstance(server.options, TruncOptions):
        return counters.accepted / counters.drafted
    return sum(count for depth, count in counters.accepted.items() if depth) / counters.tokens
