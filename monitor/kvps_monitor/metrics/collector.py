"""Makes the metric families of a scrape from what the exporter has read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvps_monitor.job_now import JOB_WORDS
from kvps_monitor.metrics.exporter import Exporter
from kvps_monitor.metrics.job_reader import JobReader
from kvps_monitor.metrics.table import COUNTER, HISTOGRAM, TABLE, Spec
from kvps_monitor.metrics.totals import FATES, Histogram, ShardTotals, WorkerTotals

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_EVENTS = {
    "kvps_joins_total": "join",
    "kvps_leaves_total": "leave",
    "kvps_evictions_total": "evict",
    "kvps_rejected_contributions_total": "reject",
}


class JobsCollector(Collector):
    """The collector of one exporter's readings."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def collect(self) -> Iterator[Family]:
        """Yield each metric of the table."""
        exporter, families = self._exporter, _Families()
        up = exporter.up
        families.add("kvps_up", [], up)
        if up:
            families.add("kvps_reading_seconds", [], exporter.reading_s)
            families.add("kvps_jobs_unreadable", [], exporter.unreadable)
            for name, value in zip(("used", "limit"), exporter.memory, strict=True):
                families.add(f"kvps_redis_memory_{name}_bytes", [], value)
            with exporter.lock:
                for reader in exporter.readers.values():
                    families.add_job(reader)
        yield from families.found.values()


class _Families:
    """The families that a scrape makes, by the names of the table."""

    def __init__(self) -> None:
        self.found = {spec.name: _family(spec) for spec in TABLE}

    def add(self, name: str, labels: Sequence[str], value: float) -> None:
        family = self.found[name]
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, float(value))

    def _add_histogram(self, name: str, labels: Sequence[str], histogram: Histogram) -> None:
        family = self.found[name]
        assert isinstance(family, HistogramMetricFamily)
        buckets = [
            ("+Inf" if math.isinf(bound) else str(bound), float(count)) for bound, count in histogram.cumulative()
        ]
        family.add_metric(labels, buckets, histogram.sum)

    def add_job(self, reader: JobReader) -> None:
        """Add all series of a job."""
        job, totals, now = reader.job.name, reader.totals, reader.now
        if now is None:
            return
        c = reader.job.config
        self.add("kvps_job_info", [job, reader.job.id, c.metadata.task, c.mode, c.transport, c.stepped_by], 1)
        for word in JOB_WORDS:
            self.add("kvps_job_state", [job, word], word == now.state)
        for name, value in {
            "kvps_versions_total": totals.versions,
            "kvps_log_versions_missed_total": totals.missed,
            "kvps_recoveries_total": totals.recoveries,
            "kvps_backlog_contributions": now.backlog,
            "kvps_units": c.units,
            "kvps_units_done_total": totals.units_done,
            "kvps_backup_tasks_total": totals.backups,
            "kvps_workers_expected": now.workers,
        }.items():
            self.add(name, [job], value)
        if reader.rollouts is not None:
            for each in ("waiting", "taken"):
                self.add(f"kvps_rollouts_{each}", [job], getattr(reader.rollouts, each))
            for fate in FATES:
                self.add(f"kvps_rollouts_{fate}_total", [job], totals.fates[fate])
            self.add("kvps_actors", [job], len(reader.rollouts.actors))
        if totals.gradient_norm is not None:
            self.add("kvps_gradient_norm", [job], totals.gradient_norm)
        if totals.learner_loss is not None:
            self.add("kvps_learner_loss", [job], totals.learner_loss)
        if reader.evaluation is not None:
            self.add("kvps_evaluation_version", [job], reader.evaluation.version)
            for figure, measured in reader.evaluation.figures.items():
                self.add("kvps_evaluation", [job, figure], measured)
        for worker, active in reader.active.items():
            self.add("kvps_worker_active", [job, worker], active)
        for worker, age in now.silent_s.items():
            self.add("kvps_worker_heartbeat_age_seconds", [job, worker], age)
        for worker, of_worker in totals.workers.items():
            self._add_worker([job, worker], of_worker)
        for shard, of_shard in enumerate(totals.shards):
            self._add_shard([job, str(shard)], of_shard, bool(now.holders[shard]))

    def _add_worker(self, labels: list[str], totals: WorkerTotals) -> None:
        self.add("kvps_contributions_total", labels, totals.contributions)
        self._add_histogram("kvps_staleness_versions", labels, totals.staleness)
        for phase, seconds in totals.seconds.items():
            self.add("kvps_worker_phase_seconds_total", [*labels, phase], seconds)
        self.add("kvps_worker_iterations_total", labels, totals.iterations)
        self.add("kvps_worker_pulled_bytes_total", labels, totals.pulled)
        self.add("kvps_worker_pushed_bytes_total", labels, totals.pushed)
        if totals.loss is not None:
            self.add("kvps_loss", labels, totals.loss)
        for name, kind in _EVENTS.items():
            self.add(name, labels, totals.events[kind])
        self.add("kvps_late_contributions_total", labels, totals.late)

    def _add_shard(self, labels: list[str], totals: ShardTotals, held: bool) -> None:
        self.add("kvps_shard_held", labels, held)
        self.add("kvps_lease_takes_total", labels, totals.takes)
        for phase, histogram in totals.phases.items():
            self._add_histogram("kvps_shard_phase_seconds", [*labels, phase], histogram)
        self.add("kvps_shard_received_bytes_total", labels, totals.received)
        self.add("kvps_shard_stored_bytes_total", labels, totals.stored)


def _family(spec: Spec) -> Family:
    if spec.type == HISTOGRAM:
        return HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
    kind = CounterMetricFamily if spec.type == COUNTER else GaugeMetricFamily
    return kind(spec.name, spec.help, labels=spec.labels)
