"""Figures of batches for Prometheus, read from the store at the time of asking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from torchwright.serve.batches.records import Status
from torchwright.serve.batches.runner import Batches


class BatchFigures(Collector):
    """Batches by status, their requests, and the bytes of the folder. Gauges all: a restart goes on with the same."""

    def __init__(self, batches: Batches, model: str, prefix: str) -> None:
        self._batches, self._model, self._prefix = batches, model, prefix

    def collect(self) -> Iterable[Metric]:
        store = self._batches.store
        found = list(store.batches.values())
        by_status = self._family("batches", "Batches that are remembered, by status.", "status")
        counts = Counter(batch.status for batch in found)
        for status in get_args(Status):
            by_status.add_metric([self._model, status], counts[status])
        yield by_status

        requests = self._family(
            "batch_requests", "Requests of batches that have not ended, by state.", "state"
        )
        open_counts = [batch.counts for batch in found if not batch.ended]
        completed = sum(count.completed for count in open_counts)
        failed = sum(count.failed for count in open_counts)
        running = self._batches.running
        # A row counts as running until its line is written and its place is free, a moment later.
        waiting = max(0, sum(count.total for count in open_counts) - completed - failed - running)
        for state, value in (
            ("waiting", waiting),
            ("running", running),
            ("completed", completed),
            ("failed", failed),
        ):
            requests.add_metric([self._model, state], value)
        yield requests

        stored = self._family("batch_storage_bytes", "Bytes of clients' files and of results.")
        stored.add_metric([self._model], store.bytes)
        yield stored

    def _family(self, name: str, help: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(self._prefix + name, help, labels=["model_name", *labels])
