"""Figures for Prometheus, by vLLM's names with the prefix `torchwright:`.

The engine's own counters come with each of its steps; times are measured here, as a client sees them.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torchwright.serve.wire.client import COUNTERS, EngineClient

PREFIX = "torchwright:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160, 320)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 100_000)
TOTALS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that the engine took."),
    "generated_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preemptions": ("num_preemptions", "Sequences that gave up their pages and were computed again."),
    "speculated_tokens": ("spec_decode_num_draft_tokens", "Tokens proposed by speculation."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Proposed tokens that were right."),
    "steps": ("engine_steps", "Steps of the engine."),
}
assert set(TOTALS) == set(COUNTERS)


class ServerMetrics:
    """The measurements of one server."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self.registry = CollectorRegistry()
        self._client, self._model = client, model
        self.registry.register(_Engine(client, model))
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's parsing to its first token.", SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of one sequence.", SECONDS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's parsing to the end of a sequence.", SECONDS
        )
        self._generated = self._histogram("request_generation_tokens", "Tokens of one sequence.", TOKENS)
        self._finished = Counter(
            PREFIX + "request_success",
            "Sequences that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.requests = Counter(
            PREFIX + "http_requests",
            "Requests by path and status; 499 is a client that left.",
            ["path", "status"],
            registry=self.registry,
        )

    def finished(self, reason: str, seconds: float, tokens: int) -> None:
        """A sequence has ended."""
        self._finished.labels(self._model, reason).inc()
        self._latency.observe(seconds)
        self._generated.observe(tokens)

    def render(self) -> bytes:
        """All figures in Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(
            PREFIX + name, help, ["model_name"], buckets=tuple(buckets), registry=self.registry
        )
        return histogram.labels(self._model)


class _Engine(Collector):
    """The engine's own figures at the time of asking."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self._client, self._model = client, model

    def collect(self) -> Iterable[Metric]:
        client, stats = self._client, self._client.stats
        yield self._gauge("engine_ready", "1 while the engine takes requests.", client.state == "ready")
        yield self._counter("engine_restarts", "Times that the engine died and was started.", client.restarts)
        running, waiting = (stats.running, stats.waiting) if stats else (0, 0)
        yield self._gauge("num_requests_running", "Sequences that have pages.", running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for pages.", waiting)
        used = stats.pages_used / stats.pages if stats and stats.pages else 0.0
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the KV pages in use, 0 to 1; not those only the cache holds.",
            used,
        )
        cached = stats.pages_cached / stats.pages if stats and stats.pages else 0.0
        yield self._gauge(
            "prefix_cache_usage_perc", "Share of the KV pages that only the cache holds.", cached
        )
        yield self._gauge("engine_step_seconds", "The last step's time.", stats.step_s if stats else 0.0)
        yield self._gauge("engine_step_tokens", "The last step's tokens.", stats.step_tokens if stats else 0)
        yield self._gauge(
            "engine_core_share",
            "Share of the engine's time lately in which it had a core; other programs take the rest.",
            stats.core_share if stats else 1.0,
        )
        for field, (name, help) in TOTALS.items():
            total = client.before[field] + (getattr(stats, field) if stats else 0)
            yield self._counter(name, help, total)
        for name, help, counts in (
            ("draft", "Proposed tokens by position.", stats.proposed_at if stats else []),
            ("accepted", "Proposed tokens that were right, by position.", stats.accepted_at if stats else []),
        ):
            family = CounterMetricFamily(
                f"{PREFIX}spec_decode_num_{name}_tokens_per_pos", help, labels=["model_name", "position"]
            )
            for position, count in enumerate(counts):
                family.add_metric([self._model, str(position)], count)
            yield family

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
        family.add_metric([self._model], float(value))
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help, labels=["model_name"])
        family.add_metric([self._model], float(value))
        return family
