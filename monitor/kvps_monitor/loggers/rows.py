"""Rows of figures, one a version, from a job's commit log and the traces of its workers. Nothing is written to Redis.

A row is ready when nothing more of its version will come. The trace of an iteration comes with a later push of its
worker, or when the worker leaves, and it has the loss; so a row waits until the trace of each of its contributions has
come, or the worker is out of the vector clock. The norm of the gradient comes with the traces of the shards, a moment
after the commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvps.history.evaluations import Evaluation
from kvps.history.log_file import LogFile
from kvps.history.log_stream import LogStream, entries_after
from kvps.job import Job
from kvps.parsing import entry_ms
from kvps.protocol.job_state import Commit, State
from kvps.protocol.plan import Contribution, Plan
from kvps_monitor.spans import Traces, WholeVersions, mean

Values = dict[str, float]


@dataclass(frozen=True)
class Row:
    """The figures of one version, by name; what is not known is left out. `at_ms` is the server's time of its commit.

    contributions, rejected           how many it has, and how many were taken out of it
    learning_rate                     of parameters in no group
    gradient_norm                     of the reduced gradient, before it is clipped
    staleness/mean, staleness/max     in versions, over its contributions
    loss                              the mean over its contributions whose loss is known, or what its learner said
    staleness/<worker>, loss/<worker> of one worker; of several contributions the largest, and the mean
    test/<name>                       what the task says of the weights of this version
    eval/<name>                       what was reported of it, in a row of its own: it comes when it is evaluated

    Of an evaluation (`is_evaluation`), `at_ms` is when it was reported.
    """

    version: int
    at_ms: int
    values: Mapping[str, float]
    is_evaluation: bool = False


class _Waiting(NamedTuple):
    """A version whose row is not ready."""

    at_ms: int
    version: int
    plan: Plan


class RowReader:
    """The rows of a job after version `after`. `read` returns those that have become ready since the last call.

    While `holds_newest` is true, the row of the newest version waits for its test. `checkpoints` is the
    directory into which an aggregator moves the older part of the log, if it is known.
    """

    def __init__(self, job: Job, after: int, holds_newest: bool = False, checkpoints: Path | None = None) -> None:
        self.missing: list[tuple[int, int]] = []  # the first and the last version of each part of the log that is gone
        self._job = job
        self._read_up_to = after
        self.holds_newest = holds_newest
        self._checkpoints = checkpoints
        self._seen = self._seen_evaluation = "0-0"
        self._losses: dict[str, dict[int, float]] = {}  # worker -> round -> loss
        self._traced_rounds: dict[str, int] = {}  # worker -> the last round of its trace that was read
        self._waiting: deque[_Waiting] = deque()
        self._handed_out = after  # the version of the last row
        self._evaluations: list[Row] = []  # that were not handed out
        self._traces = Traces(job)
        self._whole = WholeVersions(job.layout.shards)
        self._norms: dict[int, float] = {}  # version -> the norm of its gradient
        self._newest_made = [0] * job.layout.shards  # the newest version in the trace of each shard

    def read(self) -> list[Row]:
        """Return the next rows, in the order of their versions, and then those of evaluations, each of a version whose
        row was returned. Raises JobNotFound, CorruptData and ServerLost."""
        state = self._job.state()  # read first: the trace of a round that it knows of is then there
        self._read_log()
        self._read_traces()
        out = []
        while self._waiting and self._is_ready(self._waiting[0], state):
            out.append(self._row(self._waiting.popleft()))
        self._handed_out = out[-1].version if out else self._handed_out
        evaluated = [row for row in self._evaluations if row.version <= self._handed_out]
        self._evaluations = [row for row in self._evaluations if row.version > self._handed_out]
        return out + evaluated

    # -- the log ---------------------------------------------------------------------------------------------------

    def _read_log(self) -> None:
        for id, fields in LogStream(self._job.access).entries(self._seen):
            self._seen = id
            if fields.get("kind") == "commit":
                self._add(entry_ms(id, fields), Commit.of(fields))
        access = self._job.access
        for id, fields in entries_after(access.client, access.keys.evaluations, self._seen_evaluation):
            self._seen_evaluation = id
            self._add_evaluation(id, fields)

    def _add_evaluation(self, id: str, fields: dict[str, str]) -> None:
        e = Evaluation.of(fields, entry_ms(id, fields), f"evaluation {id}")
        figures = {f"eval/{name}": value for name, value in e.figures.items()}
        self._evaluations.append(Row(e.version, e.at_ms, figures, is_evaluation=True))

    def _add(self, at_ms: int, commit: Commit) -> None:
        """Note a commit. One that a server has lost and that was made again is not noted a second time."""
        if commit.version <= self._read_up_to:
            return
        if commit.version > self._read_up_to + 1:
            self._read_up_to = max(self._read_up_to, self._job.state().begin.version)  # the rest is of another job
            for moved_ms, moved in self._moved(self._read_up_to + 1, commit.version - 1):
                self._waiting.append(_Waiting(moved_ms, moved.version, moved.plan))
                self._read_up_to = moved.version
        if commit.version > self._read_up_to + 1:
            self.missing.append((self._read_up_to + 1, commit.version - 1))
        self._waiting.append(_Waiting(at_ms, commit.version, commit.plan))
        self._read_up_to = commit.version

    def _moved(self, first: int, last: int) -> Iterator[tuple[int, Commit]]:
        """Yield those commits from the file into which the log was moved, as far as it has them, each with its time."""
        if not self._checkpoints:
            return
        file = LogFile(self._checkpoints, self._job.name, self._job.id)
        if not file.path.exists():
            return
        expected = first
        for id, fields in file.entries():
            if fields.get("kind") == "commit" and (commit := Commit.of(fields)).version == expected <= last:
                yield entry_ms(id, fields), commit
                expected += 1

    def _read_traces(self) -> None:
        """Note the losses of the rounds that wait, and the norms of versions."""
        iterations, versions = self._traces.read({c.worker for each in self._waiting for c in each.plan.contributions})
        for worker, new in iterations.items():
            losses = self._losses.setdefault(worker, {})
            for i in new:
                self._traced_rounds[worker] = i.round
                if i.loss is not None:
                    # Of a contribution that came late and was dropped, the round is tried again: the last one counts.
                    losses[i.round] = i.loss
        for shard, made in versions.items():
            self._norms.update({figures.version: figures.norm for figures in self._whole.add(made)})
            if made:
                self._newest_made[shard] = made[-1].version

    # -- rows ------------------------------------------------------------------------------------------------------

    def _is_ready(self, waiting: _Waiting, state: State) -> bool:
        if self.holds_newest and waiting.version >= self._read_up_to:
            return False
        if not state.finished(self._job.config) and waiting.version > min(self._newest_made):
            return False
        return not any(self._may_come(c, state) for c in waiting.plan.contributions)

    def _may_come(self, c: Contribution, state: State) -> bool:
        """Return whether the trace of a contribution's round may still come."""
        m = state.members.get(c.worker)
        if m is None or not m.active or m.incarnation != c.incarnation or state.finished(self._job.config):
            return False
        return self._traced_rounds.get(c.worker, 0) < c.round

    def _row(self, waiting: _Waiting) -> Row:
        plan, config = waiting.plan, self._job.config
        if plan.by:  # a learner published it: there is no more to say
            return Row(waiting.version, waiting.at_ms, {} if plan.loss is None else {"loss": plan.loss})
        progress = config.progress(plan.version - 1, plan.progress)
        values: Values = {
            "contributions": float(len(plan.contributions)),
            "rejected": float(len(plan.rejected)),
            "learning_rate": config.optimizer.lr_of(config.optimizer, progress, plan.lr),
        }
        values |= self._norm_of(waiting.version) | _staleness_of(plan) | self._loss_of(plan)
        return Row(waiting.version, waiting.at_ms, values)

    def _norm_of(self, version: int) -> Values:
        """Return the norm of a version's gradient, if all shards have said theirs; forget older ones."""
        norm = self._norms.get(version)
        self._norms = {later: each for later, each in self._norms.items() if later > version}
        return {} if norm is None else {"gradient_norm": norm}

    def _loss_of(self, plan: Plan) -> Values:
        known = [
            (c.worker, loss) for c in plan.contributions if (loss := self._losses[c.worker].get(c.round)) is not None
        ]
        for c in plan.contributions:
            self._losses[c.worker] = {
                round_: loss for round_, loss in self._losses[c.worker].items() if round_ > c.round
            }
        of_all = {"loss": mean([loss for _, loss in known])} if known else {}
        return of_all | _by_worker("loss", known, mean)


def _staleness_of(plan: Plan) -> Values:
    """Return how many versions came between those that contributions were computed on and the one before this."""
    late = [(c.worker, float(max(0, plan.version - 1 - c.base))) for c in plan.contributions]
    each = [versions for _, versions in late]
    of_all = {"staleness/mean": mean(each), "staleness/max": max(each)} if each else {}
    return of_all | _by_worker("staleness", late, max)


def _by_worker(name: str, found: Iterable[tuple[str, float]], one_of: Callable[[Sequence[float]], float]) -> Values:
    """Return a figure of each worker: one of those of its contributions, as (worker, figure)."""
    of_workers: dict[str, list[float]] = {}
    for worker, figure in found:
        of_workers.setdefault(worker, []).append(figure)
    return {f"{name}/{worker}": one_of(figures) for worker, figures in sorted(of_workers.items())}
