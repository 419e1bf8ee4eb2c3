"""A job on a server: its state, weights and commit log, and `join`, by which a process becomes a worker."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count, islice
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

from kvps.arrays.layout import Array, Layout
from kvps.arrays.weights import Weights
from kvps.config import JobConfig
from kvps.connection.client import Client
from kvps.connection.cluster import open_client
from kvps.connection.replica_reader import ReplicaReader
from kvps.connection.resp import Command
from kvps.connection.sockets import ChunkGone
from kvps.device.base import CPU, Device
from kvps.errors import (
    CorruptData,
    InvalidSetting,
    ServerError,
    UsageError,
    WorkerAlive,
    WrongOrder,
    counted,
    printable,
    shown,
)
from kvps.history.checkpoint import Checkpoint
from kvps.history.evaluations import Evaluation, checked_figures, figures_json
from kvps.history.log_stream import LogStream
from kvps.history.rollouts import JobRollouts
from kvps.machine import launcher, process
from kvps.optim.settings import is_number
from kvps.parsing import JOB_ID, matching, whole, whole_setting
from kvps.protocol import worker_states
from kvps.protocol.answers import Joined, ServerRestarted, evicted, job_not_found, made_anew
from kvps.protocol.job_state import Commit, Member, State
from kvps.protocol.keys import JobKeys, check_name, check_new_name
from kvps.protocol.run_control import RunControl
from kvps.session.absence import log_absence, rounds_skipped
from kvps.session.finished import FinishedSession
from kvps.session.session import Session
from kvps.transport.access import JobAccess
from kvps.transport.base import Transport
from kvps.transport.opening import OpenedJob, find_transport, open_transport

log = logging.getLogger("kvps.session")

_REST_S = 0.02  # of one that waits for versions, between two looks: workers come first
_MOST_WORDS = 300  # characters of a reason


class Job:
    """One job on a server. May be used from several threads. `Store.job` and `Store.create_job` return one.

    A pickle of it holds the URL of the server, with its password if that stands in the URL, and the job's name and id.
    Where it is unpickled it connects anew; that raises JobNotFound if the job of this id is gone.

    access  its connection, keys, scripts and transport, for the other packages of kvps: not part of the public API
    """

    def __init__(self, client: Client, name: str, replicas: ReplicaReader | None = None) -> None:
        keys = JobKeys(name)
        stored, made_with, layout, id = client.together(
            [
                ("HGETALL", keys.config),
                ("HGETALL", keys.made_with),
                ("GET", keys.layout),
                ("HGET", keys.version, "id"),
            ]
        )
        if not stored or not layout or not id:
            raise client.lacking(job_not_found(name))
        keys = JobKeys(name, matching(id, f"the id of job {name!r}", *JOB_ID))
        access = JobAccess.of(client, keys, JobConfig.of_job(stored, made_with), Layout.from_json(layout), replicas)
        self.access = OpenedJob.over(access, open_transport(access))
        self.access.reader.check_stored()
        self._joined = WeakValueDictionary[int, Session]()  # thread -> the worker that it has joined as last
        self._was_joined = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.access.client.url, self.name, self.id)

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.config.mode}, {self.layout.size} float32)"

    @property
    def name(self) -> str:
        """The job's name, which another job may get once this one is removed."""
        return self.access.keys.job

    @property
    def id(self) -> str:
        """The job's id, which no other job ever has."""
        return self.access.keys.id

    @property
    def config(self) -> JobConfig:
        """The job's settings."""
        return self.access.config

    @property
    def layout(self) -> Layout:
        """The job's parameters, and how they are cut into shards and chunks."""
        return self.access.layout

    def state(self) -> State:
        """Return the version, vector clock and members at one instant. Raises JobNotFound."""
        return self.access.reader.state()

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the committed state of each worker that has one, see `Session.state`. Raises CorruptData."""
        return worker_states.values(self.access.client.call("HGETALL", self.access.keys.states))

    def snapshot(self) -> tuple[int, dict[str, Array]]:
        """Return the newest version and its weights, name -> read-only array: a consistent whole. Blocks no worker.

        Processes of one host share the memory of a version. In a loop, each call waits for the next version, for
        200 ms at the most.
        """
        version, flat = self.access.reader.newest()
        return version, Weights(self.layout.views(flat))

    def join(
        self, worker: str | None = None, *, device: Device | str = CPU, takeover: bool = False, prefetch: bool = False
    ) -> Session:
        """Become a worker under the id `worker`; without one, under that of this copy of a script, or under the first
        free id of w0, w1, ...

        An id belongs to one process at a time. It is free if its process has left, is silent for longer than the job's
        worker_timeout_ms, or is on this machine and dead. With `takeover` it is taken from a living process, whose next
        call raises WorkerEvicted. With `prefetch` the next weights are fetched while the worker computes, in SSP and
        ASP. `device` is where the worker computes and `pull` puts the weights; if it is only a name, such as "cuda:0",
        `pull` puts them into host memory from which that device can copy them. A job that `kvps up` or `kvps run`
        launched is for the processes of that command: others may join only if it hands out units, under other ids.
        Raises WorkerAlive, InvalidName, InvalidSetting, UsageError.
        """
        if prefetch and self.config.staleness == 0:
            raise InvalidSetting("prefetch: in BSP the next weights are not there before this round is pushed")
        transport = self._find_memory()
        if self.config.metadata.is_ours and (passes := self._passing(worker or launcher.own_name(), device)):
            return self._joined_as(passes)
        if not takeover:
            self._check_open_to_us(worker)
        shown = device if isinstance(device, str) else device.name
        if worker is None:
            worker, joined = self._join_any(shown)
        else:
            joined = self._join(self._checked_id(worker), shown, takeover)
        if find_transport(self) is not transport:  # a loss of the memory from now on evicts this worker
            with suppress(ServerRestarted):  # a restart ends that incarnation as well
                self.access.scripts.leave(worker, joined.incarnation, finished=False)
            raise evicted(worker, self.name, "the shared memory of the job was lost meanwhile")
        return self._joined_as(Session(self.access, worker, joined, device, prefetch))

    def _joined_as(self, session: Session) -> Session:
        self._joined[threading.get_ident()] = session
        self._was_joined = True
        return session

    def _find_memory(self) -> Transport:
        """Return the transport once this process sees its memory. If that is lost, wait until an aggregator has begun
        anew with what Redis has. Raises UsageError, ServerUnfit."""
        retries = self.access.client.retries()
        while (transport := find_transport(self)).seen and not transport.here:
            if not retries.pause(
                lambda: f"the shared memory of job {self.name!r} is lost, and no aggregator serves it"
            ):
                raise UsageError(
                    f"the shared memory of job {self.name!r} is lost, and for {retries.lasted} no aggregator has begun "
                    f"anew with what Redis has: kvps aggregator start --job {self.name}"
                )
        transport.check_here(
            ", which this process does not see: work there, where its aggregator runs (a container may have a /dev/shm "
            "of its own), or create the job with --transport redis"
        )
        return transport

    def _passing(self, worker: str, device: Device | str) -> Session | None:
        """Return the session of a process that only passes through the job, because this worker did all its rounds in
        an earlier process of this run; None if there are rounds to do. Raises UsageError in the evaluator of a job that
        is not finished."""
        state = self.state()
        member, over = state.members.get(worker), state.finished(self.config)
        if launcher.evaluates():
            if not over:
                raise UsageError(
                    "this process evaluates the job, and is no worker of it: have @worker.evaluates(job) before the "
                    "job is joined, or give kvps run a script for it, --evaluator"
                )
            member = max(state.members.values(), key=attrgetter("clock"), default=None)
        else:
            done = over or (member is not None and member.finished and not self.config.units)
            if not done or (member and process.is_this(member.process)):
                return None
            log.warning("worker %s: job %s is finished: no step of it is done again", worker, self.name)
        if not over:
            self.await_finished()
        rank = member.rank if member and member.worker == worker else launcher.own_rank(self.config.workers)
        return FinishedSession(self.access, worker, rank, member, self.states().get(worker, {}), device)

    def _checked_id(self, worker: str) -> str:
        """Return the id of a worker that joins. One that begins with - can only be of a worker that the job has."""
        known = check_name("worker", worker).startswith("-") and worker in self.state().clock
        return worker if known else check_new_name("worker", worker)

    def _join(self, worker: str, device: str, takeover: bool) -> Joined:
        nonce = secrets.token_hex(4)
        me = process.identity(device)

        def join(replaces: str) -> Joined:
            return self.access.in_present_history(lambda: self.access.scripts.join(worker, nonce, replaces, me))

        skipped = rounds_skipped(self.access, worker)
        try:
            joined = join("*" if takeover else "")
        except WorkerAlive as alive:
            if not process.is_dead(alive.entry):
                raise
            # Replace only the dead incarnation: if another process was quicker, the script refuses.
            joined = join(str(alive.entry["incarnation"]))
        if not self.config.units:  # a worker of units has no rounds of its own that others could make without it
            log_absence(worker, skipped, joined)
        return joined

    def stop(self, reason: str = "") -> RunControl:
        """Have all workers end with the same round: the highest one of which a contribution was accepted. All that was
        acknowledged is in the versions up to there; what is pushed later is refused. Return what the job does now.

        Each worker's loop ends by JobStopped, which the end of its `with` block catches; `next_unit` returns None. In
        ASP each worker ends at its next pull. The log has the reason, and who asked for it: the worker as which the
        calling thread has joined, or the evaluator of a run. A second call changes nothing. Raises JobNotFound,
        InvalidSetting for a reason that is too long.
        """
        return self._control("stop", reason)

    def suspend(self, reason: str = "") -> RunControl:
        """As `stop`, but the workers' loops end by JobSuspended, which ends their scripts with code 75, and they leave
        unfinished: they go on from there after `resume`, or from a checkpoint that is restored."""
        return self._control("suspend", reason)

    def pause(self, reason: str = "") -> RunControl:
        """Have no version begun until `resume`. Workers wait as the bound asks, in ASP once two of their
        contributions wait. Return what the job does now: one that was stopped or suspended is not paused."""
        return self._control("pause", reason)

    def resume(self, reason: str = "") -> RunControl:
        """Have the job go on that was paused, suspended or stopped. Workers whose loops have ended join again."""
        return self._control("resume", reason)

    def set_lr(self, lr: float | None, reason: str = "") -> None:
        """Set the learning rate of the versions that are planned from now on, in the place of the optimizer's `lr` and
        schedule; with None these are used again. The plan of each version says the rate, so that `kvps verify` computes
        with it too; a checkpoint keeps it.

        A parameter group with a rate of its own keeps its proportion to the optimizer's: of two schedules, that of
        their highest rates. With local steps it is the rate of the job's optimizer, not of the workers' inner ones.
        Raises InvalidSetting for a rate that is not finite or below 0, UsageError for a job that a learner publishes.
        """
        if self.config.metadata.publishes:
            raise UsageError(
                f"job {self.name!r} has no learning rate: set it in the learner, whose optimizer is its own"
            )
        if lr is not None and not (is_number(lr) and lr >= 0):
            raise InvalidSetting(f"lr must be a finite number from 0, not {shown(lr)}")
        self._control("set", reason, "" if lr is None else repr(float(lr)))

    def _control(self, what: str, reason: str, lr: str = "") -> RunControl:
        words = printable(" ".join(str(reason).split()))
        if len(words) > _MOST_WORDS:
            raise InvalidSetting(
                f"a reason has at most {_MOST_WORDS} characters, and this one {len(words)}: shorten it"
            )
        mine = self._joined.get(threading.get_ident())
        by = mine.worker if mine else launcher.own_name()
        return self.access.in_present_history(lambda: self.access.scripts.control(what, by, words, lr))

    def evict(self, member: Member, reason: str = "its process has ended") -> None:
        """Take a worker known to be dead out of the vector clock, without waiting for its timeout. The log says why."""
        self.access.in_present_history(lambda: self.access.scripts.evict(member.worker, member.incarnation, reason))

    @property
    def _ids(self) -> list[str]:
        """The ids of the workers for which the job waits, and of those that its launcher may start."""
        launched = self.config.metadata.foreign_launcher
        return [f"w{rank}" for rank in range(max(self.config.workers, launched.most if launched else 0))]

    def _check_open_to_us(self, worker: str | None) -> None:
        """Raise UsageError if only processes of the command that launched the job may join under this id."""
        launched = self.config.metadata.foreign_launcher
        if launched is None or (self.config.units and worker not in self._ids):
            return
        advice = (
            "it hands out no units (--data units), so that one more would have no data; kvps create makes a job for "
            "workers of your own"
        )
        if self.config.units:
            advice = f"choose another id than {worker}, or none"
        if launched.is_elsewhere:
            advice += f"; if that has ended: kvps checkpoint save {self.name}, and restore it under another name"
        raise UsageError(f"the workers of job {self.name!r} are those of {launched}: {advice}")

    def _join_any(self, device: str) -> tuple[str, Joined]:
        if self.config.metadata.is_ours and (own := launcher.own_worker()):
            with suppress(WorkerAlive):  # another thread of this copy has joined
                return own, self._join(own, device, takeover=False)
        launched = self.config.metadata.foreign_launcher
        if not launched and (fresh := self.access.scripts.reserve()):
            with suppress(WorkerAlive):  # another process took the id first
                return fresh, self._join(fresh, device, takeover=False)
        members = self.state().members
        taken = self._ids if launched else []
        there = [m.worker for m in sorted(members.values(), key=lambda m: m.rank) if not m.finished]
        there = [worker for worker in there if worker not in taken]
        unused: Iterator[str] = (worker for i in count(len(taken)) if (worker := f"w{i}") not in members)
        if not self.config.units:  # with units there is work for any number of workers
            unused = islice(unused, max(0, self.config.workers - len(members)))
        for worker in chain(there, unused):
            try:
                return worker, self._join(worker, device, takeover=False)
            except WorkerAlive:
                continue
        raise UsageError(
            f"job {self.name!r} is for {counted(self.config.workers, 'worker')}, and each is there or has finished: it "
            f"hands out no units (--data units), so that one more would have no data"
        )

    def versions(self, every: int = 1, after: int = 0) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield the newest version, and its weights as `snapshot` does, whenever the job has made the next `every`-th
        one after version `after`; at last its last one. Blocks no worker.

        What is made while the caller is busy is left out. It ends when the job is finished, stopped or suspended, or if
        all workers have left with rounds undone and none has joined for worker_timeout_ms. Raises InvalidSetting,
        JobNotFound, ServerLost.
        """
        return self._versions(whole_setting("every", every, 1), after)

    def _versions(self, every: int, seen: int) -> Iterator[tuple[int, dict[str, Array]]]:
        keys, alone_since = self.access.keys, math.inf
        asked: list[Command] = [("ZCARD", keys.rounds), ("HLEN", keys.workers), ("HGET", keys.version, "version")]
        asked += [("XREVRANGE", keys.commits, "+", "-", "COUNT", 1)]
        while True:
            present, joined, version, newest, _ = self._asked(asked)
            made, now = whole(version, "the version"), time.monotonic()
            alone_since = min(alone_since, now) if joined and not present else math.inf
            over = now - alone_since > self.config.worker_timeout_ms / 1000
            if not present:
                state = self.state()
                over = over or state.finished(self.config) or state.run.state == "suspended"
            seen = min(seen, made)  # a server that lost its last writes makes those versions again
            if made // every > seen // every or (over and made > seen):
                seen, weights = self.snapshot()
                yield seen, weights
            elif over:
                return
            else:
                self.access.client.wait({keys.commits: newest[0][0] if newest else "0-0"})
                time.sleep(_REST_S)

    def report(self, version: int, figures: Mapping[str, float], by: str = "") -> Evaluation:
        """Note what somebody has measured of the weights of a version, as in ``job.report(version, {"loss": 0.12})``:
        it is in the log, on all screens and in training logs.

        `figures` are 1 to 32 numbers, finite or not, under names like a worker's. `by` is who measured them: by default
        this worker or this process. Raises InvalidSetting, InvalidName, and UsageError for a version that is not there.
        """
        checked, nonce = checked_figures(figures), secrets.token_hex(8)
        version = whole_setting("version", version, 0)
        me = process.identity()
        who = by or launcher.own_name() or f"{me['host']}:{me['pid']}"
        encoded = figures_json(checked)
        at_ms = self.access.in_present_history(lambda: self.access.scripts.report(version, encoded, who, nonce))
        return Evaluation(version, checked, who, at_ms)

    def evaluation(self) -> Evaluation | None:
        """Return what was reported last; None if nothing was. Raises CorruptData."""
        fields = self.access.client.call("HGETALL", self.access.keys.evaluation)
        return Evaluation.stored(fields) if fields else None

    def await_finished(self) -> bool:
        """Wait until all workers have done all their rounds and these are committed, as before a last `snapshot`.

        Return False if all workers have left with rounds undone and none has joined for worker_timeout_ms, or if they
        have left because the job was suspended. A worker must leave before it waits. Raises WrongOrder in a thread
        whose worker has not left.
        """
        if (mine := self._joined.get(threading.get_ident())) and not mine.closed:
            me = self.state().members.get(mine.worker)
            if me and me.active and me.incarnation == mine.incarnation:
                raise WrongOrder(
                    f"worker {mine.worker!r} has not left, and would wait for itself: leave first, or call finish() of "
                    f"a kvps.torch.Optimizer, which leaves and waits"
                )
        keys, alone_since = self.access.keys, math.inf
        while True:
            present, joined, last_entry = self._asked([("ZCARD", keys.rounds), ("HLEN", keys.workers)])
            if not present:
                state = self.state()
                if state.finished(self.config) or state.run.state == "suspended":
                    return state.finished(self.config)
            now = time.monotonic()
            alone_since = min(alone_since, now) if joined and not present else math.inf
            if now - alone_since > self.config.worker_timeout_ms / 1000:
                return False
            self.access.client.wait({keys.turns: last_entry})

    def _asked(self, commands: Sequence[Command]) -> list[Any]:  # a `LocalJob` also asks if it is served
        return self.access.reader.asked(commands)

    @property
    def rollouts(self) -> JobRollouts:
        """The experience that actors send to the learner of the job, and the fate of each item."""
        return JobRollouts(self.access)

    def checkpoint(self) -> Checkpoint:
        """Return the newest version: weights, optimizer state, clocks, units and members as of one instant.

        Blocks no worker. Raises CorruptData if bytes are missing, UsageError if they are on another host.
        """
        find_transport(self).check_here(": do it there")
        while True:
            state = self.access.reader.held(1 + len(self.config.slots))
            try:
                return Checkpoint.of(self.access, state)
            except ChunkGone as gone:  # another reader has pinned another version
                if self.state().version <= state.version + 1:  # too new to have been freed
                    damage = CorruptData(f"version {state.version} of job {self.name!r}: {gone}")
                    raise self.access.client.lacking(damage) from None

    def log(self) -> Iterator[Commit]:
        """Iterate over the commits of the log in Redis, oldest first: all of them, or the newest ones, if an aggregator
        has moved or deleted others."""
        return LogStream(self.access).commits()


def _reopened(url: str, name: str, id: str) -> Job:
    """Return the job of this name and id on a connection of its own. Raises JobNotFound, NoServer."""
    client = open_client(url)
    try:
        job = Job(client, name)
        if job.id != id:
            raise made_anew(name)
    except BaseException:
        client.close()
        raise
    return job


def is_left(job: Job) -> bool:
    """Return whether this process has joined the job, and has closed all its sessions."""
    return job._was_joined and all(session.closed for session in job._joined.values())


def await_unit(job: Job) -> bool:
    """Wait until a unit of data is free, as when its worker dies; return False once all units are committed, or if the
    job was stopped or suspended.

    A worker must leave before it waits, or the others wait for it, and join again when a unit is free. Raises
    JobNotFound, and for a `LocalJob` what its aggregator raised.
    """
    keys = job.access.keys
    while True:
        counts, free, run, last_entry = job._asked(
            [("HMGET", keys.units, "next", "done"), ("ZCARD", keys.free_units), ("HGET", keys.version, "run")]
        )
        handed_out, done = (whole(number or 0, "units: next and done") for number in counts)
        if done >= job.config.units or (run and run != "pause"):
            return False
        if free or handed_out < job.config.units:
            return True
        job.access.client.wait({keys.turns: last_entry})


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Have errors about what is stored for a job name the job. Raises CorruptData."""
    try:
        yield
    except (CorruptData, ServerError) as error:
        if type(error) not in (CorruptData, ServerError):  # a server that is lost or full says nothing of the job
            raise
        about = f"job {name!r}"
        raise CorruptData(str(error) if about in str(error) else f"{about}: {error}") from error
