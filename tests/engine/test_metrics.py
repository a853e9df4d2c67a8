"""What Prometheus is told: the counters' own totals, whenever they are published, in a registry of the test's own."""

from __future__ import annotations

import types
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sglang_trunc.core.counters import Counters, PipelineCounters
from sglang_trunc.core.lane_tree import LOOKUP
from sglang_trunc.core.options import DualOptions, SingleOptions, TruncOptions
from sglang_trunc.engine import departures, metrics
from sglang_trunc.engine.metrics import PREFIX, publisher, publisher_for, scheduler_labels, ticks_by_width
from tests.engine.markov_stand import Tables, TableServer
from tests.engine.sampling_stand import request
from tests.engine.worker_stand import Client, batch, decode, scripted_worker

pytestmark = pytest.mark.usefixtures("sglang_context")
LABELS = {"model_name": "tiny", "tp_rank": 0}


class Scrape:
    """A registry, read as a server would."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def __call__(self, name: str, **label: str) -> float | None:
        labels = {**{key: str(value) for key, value in LABELS.items()}, **label}
        return self.registry.get_sample_value(PREFIX + name, labels)

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric's values by this label."""
        samples = [s for family in self.registry.collect() for s in family.samples if s.name == PREFIX + name]
        return {sample.labels[label]: sample.value for sample in samples}

    @property
    def names(self) -> set[str]:
        samples = [sample.name for family in self.registry.collect() for sample in family.samples]
        return {name.removeprefix(PREFIX) for name in samples if not name.endswith("_created")}


def served(options: TruncOptions | DualOptions) -> tuple[TableServer, metrics.Publisher, Scrape]:
    reqs = [request(f"r{row}", [1 + row % 3, 2], 30) for row in range(6)]
    for row, req in enumerate(reqs):
        req.output_ids = [1 + row]
    server, scrape = TableServer(Tables(12), options, reqs), Scrape()
    return server, publisher(server.worker, LABELS, scrape.registry), scrape


TRUNC = TruncOptions(1, 5, 0.0, lookup=3, lookup_min_match=1)
DUAL = DualOptions(d1=1, d2=2, max_width=12, min_survival=0.0, lookup=2, lookup_min_match=1)


def check_common(counters: Any, scrape: Scrape) -> None:
    for name in ("rounds", "runs", "tokens", "ticks", "rows", "request_ticks", "screened_out"):
        assert scrape(name + "_total") == getattr(counters, name), name
    assert scrape.by("readouts_total", "depth") == {str(depth): rows for depth, rows in counters.readouts.items()}
    assert scrape("ticks_by_width_total", le="+Inf") == counters.ticks
    assert scrape("ticks_by_width_total", le="4") == sum(n for rows, n in counters.widths.items() if rows <= 4)


@pytest.mark.parametrize("every", [1, 3])
def test_truncs_totals(every):
    """Published every round, or now and then."""
    server, told, scrape = served(TRUNC)
    for number in range(9):
        server.round(range(len(server.reqs)))
        if number % every == every - 1:
            told.publish()
            check_common(server.worker.counters, scrape)
    counters = server.worker.counters
    drafted, accepted = scrape.by("drafted_total", "source"), scrape.by("accepted_total", "source")
    assert drafted["lookup"] == counters.looked_up > 0
    assert accepted["lookup"] == counters.looked_up_accepted > 0
    assert sum(drafted.values()) == counters.drafted + counters.screened_out > counters.drafted
    assert sum(accepted.values()) + counters.runs == scrape("tokens_total") == counters.tokens
    assert all(accepted[source] <= drafted[source] for source in drafted)
    for name in ("drafted_by_position", "accepted_by_position"):
        by_place = {str(place): count for place, count in getattr(counters, name).items()}
        assert scrape.by(name + "_total", "position") == by_place
    assert not {"restarts_total", "lanes", "rows_wasted_total"} & scrape.names


def test_a_pipelines_totals():
    server, told, scrape = served(DUAL)
    server.run(12)
    told.publish()
    counters = server.worker.counters
    check_common(counters, scrape)
    for name in ("restarts", "missed", "ended", "cold_starts", "lanes_dropped", "rows_wasted"):
        assert scrape(name + "_total") == getattr(counters, name), name
    names = {1: "d1", 2: "d2", LOOKUP: "lookup"}
    for name in ("drafted", "accepted"):
        by_source = {names[depth]: count for depth, count in getattr(counters, name).items()}
        assert scrape.by(name + "_total", "source") == by_source
        assert len(by_source) == 3
    made = sum(scrape.by("accepted_total", "source").values()) + scrape("restarts_total") + scrape("ended_total")
    assert made == scrape("tokens_total")
    assert scrape.by("accepted_by_position_total", "position") == {}


def test_a_publication_with_nothing_new_changes_nothing():
    server, told, scrape = served(TRUNC)
    server.round(range(6))
    told.publish()
    before = scrape("tokens_total"), scrape("accepted_total", source="d1")
    told.publish()
    assert (scrape("tokens_total"), scrape("accepted_total", source="d1")) == before != (0, 0)


@pytest.mark.parametrize(
    ("counters", "options", "sources"),
    [
        (Counters(), TruncOptions(1, 4, 0.0), {"d1", "lookup"}),
        (PipelineCounters(), SingleOptions(d1=2, max_width=4, min_survival=0.0), {"d1"}),
        (PipelineCounters(), DualOptions(d1=1, d2=2, max_width=4, min_survival=0.0), {"d1", "d2"}),
    ],
)
def test_every_series_is_there_before_the_first_round(counters, options, sources):
    scrape, pipeline = Scrape(), types.SimpleNamespace(trees={})
    publisher(types.SimpleNamespace(counters=counters, options=options, pipeline=pipeline), LABELS, scrape.registry)
    assert scrape.by("drafted_total", "source") == dict.fromkeys(sources, 0.0)
    assert scrape("tokens_total") == 0.0


def test_widths_are_cumulative_and_wide_ones_are_the_last():
    counters = Counters()
    for rows, ticks in ((1, 2), (2, 3), (3, 5), (4, 7), (256, 11), (257, 13), (2000, 17)):
        counters.count_ticks(ticks, rows, 1)
    found = ticks_by_width(counters)
    assert found == {
        **{"1": 2, "2": 5, "4": 17, "8": 17, "16": 17, "32": 17, "64": 17, "128": 17},
        **{"256": 28, "+Inf": 58},
    }


# In a worker.


def test_a_worker_publishes_its_rounds_and_departures():
    """The gauge is of now: a request that leaves takes its lanes along."""
    worker, client, other, scrape = scripted_worker(), Client(1), Client(3), Scrape()
    worker._publisher = publisher(worker, LABELS, scrape.registry)
    pool = types.SimpleNamespace()
    departures.announce(pool, worker._depart)
    worker.lookups = types.SimpleNamespace(forget=lambda rid: None)

    def forward() -> None:
        round_of = batch(client, other)
        round_of.forward_mode, round_of.is_extend_in_batch = types.SimpleNamespace(is_extend=lambda: False), False
        lengths = worker.forward_batch_generation(round_of).accept_lens.tolist()
        assert scrape("tokens_total") == worker.counters.tokens
        assert sum(lengths) > 0

    forward()
    assert scrape("lanes") == len(worker.pipeline.lanes()) > 2
    wasted = scrape("rows_wasted_total")
    for one in (client, other):
        departures.on_free(None, pool, one.req)
    assert scrape("lanes") == 0
    assert scrape("rows_wasted_total") == worker.counters.rows_wasted > wasted


def test_without_the_flag_there_is_nothing(sglang_context):
    assert not sglang_context.get_observability().enable_metrics
    worker, client = scripted_worker(), Client(1)
    assert publisher_for(worker) is None
    decode(worker, client)
    assert worker._publisher is None


def test_with_the_flag_it_is_sglangs_registry_and_labels(monkeypatch):
    """What the flag makes of a worker, but for the registry."""
    bag = types.SimpleNamespace(enable_metrics=True, extra_metric_labels={"rack": "b"})
    monkeypatch.setattr(metrics, "get_observability", lambda: bag)
    scrape = Scrape()
    monkeypatch.setattr("prometheus_client.REGISTRY", scrape.registry)
    worker, client = scripted_worker(), Client(1)
    told = publisher_for(worker)
    decode(worker, client)
    assert told is not None
    told.publish()
    labels = {key: str(value) for key, value in scheduler_labels().items()}
    assert labels["engine_type"] == "unified"
    assert labels["rack"] == "b"
    assert {"model_name", "tp_rank", "pp_rank", "moe_ep_rank"} < set(labels)
    assert scrape.registry.get_sample_value(PREFIX + "rounds_total", labels) == 1
