"""`kvps verify`: proves the commit log of a job, and says how much it proved."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from kvps_aggregator.verify.chain import Unproved
from kvps_aggregator.verify.differences import differences_followed
from kvps_aggregator.verify.fates import Experience, experience_proved
from kvps_aggregator.verify.recording import Recorded
from kvps_aggregator.verify.replay import Encode, Proof, Source, prove
from kvps_workers import Task, load_task
from kvps_workers.contributions import Contributions
from kvps_workers.rounds import round_number
from kvps_workers.task import blamed

from kvps.arrays.formats import Bytes
from kvps.arrays.layout import DTYPE, Array
from kvps.config import JobConfig
from kvps.errors import CorruptData, InvalidSetting, KvpsError, counted, shown
from kvps.history.checkpoint import Checkpoint
from kvps.history.commit_log import Log
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.parsing import bytes_text
from kvps.protocol.job_state import Commit, State
from kvps.protocol.plan import Contribution
from kvps_cli import connect, options
from kvps_cli.long_work import LongWork
from kvps_cli.output import print_json
from kvps_cli.supervise import SAME_BITS

_HEAD = re.compile("[0-9a-f]{12,40}")


def verify(
    job: options.AnyJobName = None,
    record: Annotated[
        Path | None,
        options.existing_directory(
            "Replay the contributions that --record kept in this directory, instead of computing them again."
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None, options.existing_directory("Also read the part of the log that was moved to this directory.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Replay from this checkpoint on instead of from version 0."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="HEAD", help="Prove too that a version has this head, which was noted elsewhere before."),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    redis: options.Redis = None,
) -> None:
    """Prove that a job's commit log is one unbroken chain, and that its replay makes the same weights bit for bit.

    Gradients are computed again if the job has a task: on the CPU with one thread, as in kvps up.
    With --record, they are read from files instead. Nothing replays the versions that a learner published: there, the
    differences between versions that are still in Redis are followed.
    """
    if head is not None and not _HEAD.fullmatch(head):
        raise InvalidSetting(f"--head wants 12 to 40 hexadecimal digits, as kvps status shows them, not {shown(head)}")
    if record is None:
        _compute_as_workers_do()
    with connect.existing_store(redis) as store:
        opened = store.job(job or connect.only_job(store))
        with LongWork(quiet, as_json) as work:
            state, proof = proof_of(opened, record, checkpoints, Checkpoint.load(start) if start else None, work)
            at = _version_of(head, Log(LogStream(opened.access), state, checkpoints)) if head else None
    if as_json:
        noted = {"noted": at} if head else {}
        print_json({"job": opened.name, "version": state.version} | dataclasses.asdict(proof) | noted)
    else:
        _show(state, proof, opened.config)
        if at is not None:
            print(f"noted       version {at} has the head {head}")
    if proof.differs:
        raise KvpsError(f"job {opened.name}: {proof.differs}")
    if head and at is None:
        raise KvpsError(
            f"job {opened.name}: no version has the head {head}: the log was written anew after that was noted, or "
            f"begins later (--checkpoints DIR reads what was moved)"
        )


def _version_of(head: str, log: Log) -> int | None:
    """Return the version that has a head, of which the first digits are given; None if none has."""
    heads = chain([log.begin[:2]], ((commit.version, commit.head) for commit in log.commits()))
    return next((version for version, each in heads if each.startswith(head)), None)


def proof_of(
    job: Job,
    record: Path | None = None,
    checkpoints: Path | None = None,
    start: Checkpoint | None = None,
    work: LongWork | None = None,
) -> tuple[State, Proof]:
    """Return a state of a job, and what can be proved of the job up to it. Its workers may work meanwhile.

    `work` shows how far it is. Raises InvalidSetting for a checkpoint of another model, and for a record of a job that
    a learner publishes.
    """
    published = job.config.metadata.publishes
    if record and published:
        raise InvalidSetting(
            f"--record: a learner publishes job {job.name!r}, and it has no contributions: leave it out"
        )
    if start and start.layout.parameters != job.layout.parameters:
        raise InvalidSetting(f"--from: the checkpoint is of another model than job {job.name!r} has")
    flat: Array = np.empty(job.layout.size, DTYPE)
    work = work or LongWork(quiet=True)
    with work.stage(f"reading the weights ({bytes_text(flat.nbytes)})"):
        version = job.access.reader.fetch(job.state(), flat).version
    state = job.state()  # read after the weights: the log then reaches at least their version
    source: Source | None = None
    if record is not None:
        source = Recorded(record, job.name, state.id, job.layout, job.config.gradient_format)
    elif job.config.metadata.task and not job.config.takes_local_steps:
        source = Recomputed(job, state)
    takes = published and bool(job.config.metadata.rollouts)
    before = job.rollouts.now(staleness=False) if takes else None
    with work.stage("reading the log"):
        log = _WatchedLog(job, state, checkpoints, work)
    proof = prove(log, state, job.config, job.layout, (version, flat), source, start)
    if published and not proof.differs:
        try:
            proof = dataclasses.replace(proof, differences=differences_followed(job.access, log, state))
            if before:
                with work.stage("checking the experience"):
                    proof = dataclasses.replace(proof, experience=experience_proved(job, log, state, before))
        except (Unproved, CorruptData) as reason:
            return state, dataclasses.replace(proof, differs=str(reason))
    return state, proof


class _WatchedLog(Log):
    """A log that shows how far its readers are. The proof reads it twice: for the chain, and for the replay."""

    def __init__(self, job: Job, state: State, directory: Path | None, work: LongWork) -> None:
        super().__init__(LogStream(job.access), state, directory)
        self._work, self._total = work, state.version - self.begin.version
        second = "following the differences" if job.config.metadata.publishes else "replaying"
        self._readings = iter(("checking the chain", second))

    def commits(self) -> Iterator[Commit]:
        with self._work.stage(next(self._readings, "reading"), self._total, "commits") as stage:
            for commit in super().commits():
                yield commit
                stage.add()


class Recomputed:
    """A source for a replay: the job's task computes each contribution again, on the same weights and batch."""

    proof = "recomputed"
    wants_weights = True

    def __init__(self, job: Job, state: State) -> None:
        self._config = job.config
        self._layout = job.layout
        self._members = state.members

    @cached_property
    def _task(self) -> Task:
        return load_task(self._config.metadata.task)

    @cached_property
    def _contributions(self) -> Callable[[int], Contributions]:
        return lru_cache(None)(lambda rank: Contributions(self._config, self._layout, self._task, rank))

    def initial(self) -> Array:
        """Return version 0, (size,) float32. Raises Unproved."""
        with _unproved():
            task = self._task
            with blamed(self._config.metadata.task):
                params = task.parameters(self._config.seed)
            return np.concatenate(self._layout.hosted(params, "parameter"))

    def contribution(self, contribution: Contribution, weights: Array | None, encode: Encode) -> Bytes:
        """Return the contribution as it was on the wire. Raises Unproved."""
        assert weights is not None
        with _unproved():
            again = self._contributions(self._members[contribution.worker].rank)
            number = round_number(contribution)
            computed = again.compute(self._layout.views(weights), number)
            if contribution.weight not in (0, weight := again.weight(number) or 1):
                raise Unproved(f"it weighs {contribution.weight}, where its batch weighs {weight}")
            return encode(np.concatenate(self._layout.hosted(computed.grads, "gradient")))

    def otherwise(self, contribution: Contribution, shard: int) -> str:
        """Return why the task may give another gradient here."""
        member = self._members[contribution.worker]
        return (
            f"task {self._config.metadata.task!r} gives another gradient here. It or its data has changed, or it is "
            f"not deterministic, or {member.worker} ({member.device} on {member.host}) had another GPU, processor, "
            f"BLAS or number of threads; a job run with --record DIR can be replayed anywhere"
        )


@contextmanager
def _unproved() -> Iterator[None]:
    """Raise Unproved for an error of the task."""
    try:
        yield
    except KvpsError as error:
        raise Unproved(str(error)) from error


def _compute_as_workers_do() -> None:
    """Restart this command with one BLAS thread, as the workers of `kvps up` have, or with the number the user set.

    The number of threads decides how a matrix product is cut, and so its bits. BLAS reads it once, when NumPy is
    loaded, and this process has loaded NumPy. exec keeps the process, so nobody has to pass on its signals, its
    output or its exit code.
    """
    environment = SAME_BITS | os.environ
    if environment != dict(os.environ):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-P", "-m", "kvps", *sys.argv[1:]], environment)


def _show(state: State, proof: Proof, config: JobConfig) -> None:
    whole = proof.commits == state.version
    end = f"ends at the job's head {proof.head[:12]}" if whole else f"as far as commit {proof.commits}"
    behind = f" after version {proof.since}" if proof.since else ""
    number = counted(proof.commits - proof.since, "commit")
    print(f"chain       {number}{behind}, {counted(proof.contributions, 'contribution')}: unbroken, {end}")
    if config.metadata.publishes:
        print(f"published   {counted(proof.commits - proof.since, 'version')} by {counted(proof.learners, 'learner')}")
        if proof.experience != Experience():
            print(f"experience  {proof.experience}{f', after version {proof.since}' if proof.since else ''}")
    elif proof.by:
        since = f" after version {proof.replayed_since}" if proof.replayed_since else ""
        number = counted(state.version - proof.replayed_since, "commit")
        print(f"{proof.by:<12}{proof.replayed:,} of {number}{since} bit-identical")
    elif proof.since:
        print(
            f"replayed    nothing: the log begins after version {proof.since}; give --checkpoints DIR, where "
            f"the rest was moved if the aggregator had one, or --from FILE, a checkpoint of that version or a later one"
        )
    else:
        print("replayed    nothing: no task computes its gradients again, and no --record DIR was given")
    if proof.differences:
        print(f"differences {proof.differences:,} {'follow' if proof.differences > 1 else 'follows'}")
    if not proof.differs and (proof.by or proof.weights_version > proof.since):
        equal = "made by the replay" if proof.by else "logged by its commit"
        print(f"weights     version {proof.weights_version}, sha256 {proof.weights_sha256}: in Redis as {equal}")
