"""The worker's totals in Prometheus, beside SGLang's own metrics; only with ``--enable-metrics``.

The scheduler process writes into ``prometheus_client``'s default registry, as SGLang's ``SchedulerMetricsCollector``
does: in multiprocess mode that is a file, which the HTTP server reads for ``/metrics``. Names begin with
``sglang_trunc_``; labels are those of SGLang's scheduler metrics, so that one can be divided by the other.

A publisher is made once, when the pools exist. ``publish`` adds what the counters have gained since the last time: at
the end of every worker call, and when a request has left, which drops its lanes. It never reads the device.

Widths are no Prometheus histogram, which would have to be told tick by tick, but a counter of the same shape:
``sglang_trunc_ticks_by_width_total{le="8"}`` are the ticks of at most 8 rows, and ``histogram_quantile`` takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_serving

from sglang_trunc.core.account import draft_names
from sglang_trunc.core.counters import Counters, PipelineCounters, TickCounters
from sglang_trunc.engine.reporting import live_lanes

PREFIX = "sglang_trunc_"
WIDEST = 8  # power of two: 256 rows, the last bucket but +Inf
BUCKETS = (*(str(2**power) for power in range(WIDEST + 1)), "+Inf")


class Metric(NamedTuple):
    """One Prometheus counter."""

    name: str  # between the prefix and "_total"
    text: str
    read: Callable[[Any], Mapping[Any, int]]  # totals by value of the label; with no label, one under None
    label: str | None = None


def _plain(name: str, text: str) -> Metric:
    return Metric(name, text, lambda counters: {None: getattr(counters, name)})


def _by_key(name: str, text: str, field: str, label: str) -> Metric:
    return Metric(name, text, lambda counters: getattr(counters, field), label)


def ticks_by_width(counters: TickCounters) -> dict[str, int]:
    """Ticks of at most so many rows, by bucket, cumulative."""
    buckets = [0] * len(BUCKETS)
    for rows, ticks in counters.widths.items():
        buckets[min((rows - 1).bit_length(), WIDEST + 1)] += ticks
    for index in range(1, len(buckets)):
        buckets[index] += buckets[index - 1]
    return dict(zip(BUCKETS, buckets, strict=True))


COMMON = (
    _plain("rounds", "Worker calls that decoded."),
    _plain("runs", "Requests of all rounds."),
    _plain("tokens", "Tokens that rounds committed, those past a stop included."),
    _plain("ticks", "Passes over the recurrent block; plain decoding takes R of them for a token."),
    _plain("rows", "Rows of all ticks."),
    _plain("request_ticks", "Ticks, once for every request that waited for them."),
    _plain("screened_out", "Looked-up tokens that went because d1 chose others."),
    _by_key("readouts", "Rows read out, by depth.", "readouts", "depth"),
    Metric("ticks_by_width", "Ticks of at most so many rows.", ticks_by_width, "le"),
)
DRAFTED = "Drafts that were started, by what proposed them."
ACCEPTED = "Drafts that became text, by what proposed them."
TRUNC = (
    Metric(
        "drafted",
        DRAFTED,
        lambda c: {"d1": c.drafted - (c.looked_up - c.screened_out), "lookup": c.looked_up},
        "source",
    ),
    Metric(
        "accepted",
        ACCEPTED,
        lambda c: {"d1": c.accepted - c.looked_up_accepted, "lookup": c.looked_up_accepted},
        "source",
    ),
    _by_key("drafted_by_position", "Drafts that were verified, by place.", "drafted_by_position", "position"),
    _by_key("accepted_by_position", "Drafts that became text, by place.", "accepted_by_position", "position"),
)
_PIPELINES = (
    _plain("restarts", "Tokens after which a fresh lane started."),
    _plain("missed", "Restarts on a token that had been proposed."),
    _plain("ended", "Tokens after which nothing was wanted."),
    _plain("cold_starts", "Requests that came into a round without lanes."),
    _plain("warm_starts", "Requests whose lanes started during their prefill."),
    _plain("warm_rows", "Rows that ran along with a prefill, beside those of ticks."),
    _plain("lanes_dropped", "Lanes that did not become text."),
    _plain("rows_wasted", "Rows of such lanes."),
)


def pipelines(names: Mapping[int, str]) -> tuple[Metric, ...]:
    """``names``: of the sources of drafts (``core.account.draft_names``)."""

    def named(field: str) -> Callable[[PipelineCounters], Mapping[str, int]]:
        return lambda counters: {name: getattr(counters, field)[source] for source, name in names.items()}

    return (
        Metric("drafted", DRAFTED, named("drafted"), "source"),
        Metric("accepted", ACCEPTED, named("accepted"), "source"),
        *_PIPELINES,
    )


class Series:
    """One metric's counters in a registry, one for each value of its label."""

    def __init__(self, metric: Metric, counters: TickCounters, labels: Mapping[str, str], registry: Any):
        # Late: prometheus_client looks for its multiprocess directory when it is imported.
        from prometheus_client import Counter

        names = [*labels, metric.label] if metric.label else [*labels]
        self._metric = metric
        self._counters = counters
        self._labels = labels
        self._family = Counter(PREFIX + metric.name, metric.text, names, registry=registry)
        # A series that is there from the start has a rate from the first event on.
        self._known = {value: self._child(value) for value in metric.read(counters)}
        self._published = dict.fromkeys(self._known, 0)

    def publish(self) -> None:
        for value, total in self._metric.read(self._counters).items():
            if value not in self._known:
                self._known[value], self._published[value] = self._child(value), 0
            if total != self._published[value]:
                self._known[value].inc(total - self._published[value])
                self._published[value] = total

    def _child(self, value: Any) -> Any:
        own = {self._metric.label: str(value)} if self._metric.label else {}
        return self._family.labels(**self._labels, **own)


class Publisher:
    """Brings a worker's totals into a registry."""

    def __init__(
        self,
        counters: TickCounters,
        metrics: tuple[Metric, ...],
        labels: Mapping[str, str],
        registry: Any,
        lanes: Callable[[], int] | None = None,
    ):
        """``lanes``: how many there are, for schedules whose lanes outlive a round."""
        from prometheus_client import Gauge

        self._series = [Series(metric, counters, labels, registry) for metric in metrics]
        self._lanes, self._gauge = lanes, None
        if lanes is not None:
            text = "Lanes of all requests, as of now."
            family = Gauge(PREFIX + "lanes", text, [*labels], registry=registry, multiprocess_mode="mostrecent")
            self._gauge = family.labels(**labels)
        self.publish()

    def publish(self) -> None:
        """Add what has been counted since the last call."""
        for series in self._series:
            series.publish()
        if self._gauge is not None and self._lanes is not None:
            self._gauge.set(self._lanes())


def publisher_for(worker: Any) -> Publisher | None:
    """The one publisher of a worker; None without ``--enable-metrics``: then nothing is made, nor imported."""
    if not get_observability().enable_metrics:
        return None
    from prometheus_client import REGISTRY

    return publisher(worker, scheduler_labels(), REGISTRY)


def publisher(worker: Any, labels: Mapping[str, str], registry: Any) -> Publisher:
    """A worker's totals with these labels, in this registry."""
    counters, options = worker.counters, worker.options
    if isinstance(counters, Counters):
        return Publisher(counters, COMMON + TRUNC, labels, registry)
    names = draft_names(options.d1, getattr(options, "d2", None), options.lookup > 0)
    return Publisher(counters, COMMON + pipelines(names), labels, registry, lambda: live_lanes(worker.pipeline))


def scheduler_labels() -> dict[str, str]:
    """As ``SchedulerMetricsCollector.init_new`` makes them for a server that we serve: one rank of everything."""
    parallel = get_parallel()
    return {
        "model_name": get_serving().served_model_name,
        "engine_type": DisaggregationMode.to_engine_type(get_disagg().disaggregation_mode),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
        **(get_observability().extra_metric_labels or {}),
    }
