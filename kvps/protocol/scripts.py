"""The Lua scripts as typed methods: the only module that knows their keys, arguments and answers.

The header of each `.lua` file says what the script does and what it may answer. Here every answer becomes a value or an
error of `kvps.errors`. A script answers a repeat as it answered the first time, so a `Call` whose reply was lost is
simply made again (redis-py's own retries are off).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.errors import (
    ContributionLate,
    CorruptData,
    JobExists,
    JobNotFound,
    LeaseLost,
    UsageError,
    WorkerAlive,
    WorkerEvicted,
    WrongOrder,
)
from kvps.parsing import Fields, whole
from kvps.protocol.keys import JobKeys
from kvps.protocol.lua_scripts import Call, Request, T, evaluate, load_scripts, with_scripts
from kvps.protocol.plan import Contribution, Plan

_NAMES = [
    "acquire",
    "create",
    "evict",
    "forget",
    "free",
    "heartbeat",
    "join",
    "leave",
    "mirror",
    "norm",
    "own",
    "pin",
    "plan",
    "push",
    "ready",
    "recover",
    "reject",
    "remove",
    "renew",
    "reserve",
    "rollback",
    "next_unit",
    "sync",
    "trace",
    "trim",
]
Safely = Callable[..., Any]
"""Runs a mark and a command as `kvps.connection.client.Client.call_safely` does."""
_SHARD = re.compile(r"[0-9]{1,4}")
_FLOAT = re.compile(r"[0-9]{1,309}(\.[0-9]{1,30})?(e[+-]?[0-9]{1,3})?|inf|nan")
SCRIPTS = load_scripts("kvps.protocol", _NAMES)


class Joined(NamedTuple):
    """The answer to a worker's join. `round` is the last round that the worker need not do any more; `residual` is the
    name of the residual that the last incarnation stored when it left, or ""; `weight_sum` is that of `Accepted`."""

    rank: int
    incarnation: str
    round: int
    clock: int
    pending: int
    residual: str
    weight_sum: int


class Accepted(NamedTuple):
    """An acknowledged contribution: the clock it was acknowledged as, and its round. `weight_sum` is the sum of the
    weights of all that was accepted from its worker; 0 unless the job's rounds end by the clock."""

    clock: int
    round: int
    weight_sum: int


class Planned(NamedTuple):
    """The committed version, the pin as JSON or "", and the open plan if there is one.

    `members` is the number of workers that are not gone: in the clock, or with contributions that still wait. After
    `grace_ms` a plan may be due though nothing more has come; 0 if that is not so.
    """

    version: int
    pin: str
    members: int
    plan: Plan | None
    waits_for_workers: bool
    grace_ms: int = 0


class Acquired(NamedTuple):
    """The term under which a shard was taken; "" if another aggregator, `holder`, has its lease.

    `future_ms` is 0 unless that lease had more time left than a lease lasts. Then it is that time: the server's clock
    was set back, and the lease now ends as if it was taken this moment.
    """

    term: str
    holder: str
    future_ms: int


class Evicted(NamedTuple):
    """The workers that were taken out of the vector clock. `future_ms` is how far the latest sign of life lay in the
    future: the server's clock was set back by about that much. A time in the future counts as now."""

    workers: list[str]
    future_ms: int


class CommitResult(NamedTuple):
    """The result of `ready`. If `flipped`, this call made the version visible, and `commit_id` is its log entry."""

    flipped: bool
    pin: str
    commit_id: str


class ServerRestarted(Exception):
    """The server was restarted and may have lost its last writes. The script changed nothing; see `recover`."""


class PlanGone(Exception):
    """The plan was committed or replaced in the meantime: read the open plan again."""


class InboxFull(Exception):
    """The worker has as many waiting contributions as the job allows: wait for a commit."""


class JobScripts:
    """The scripts of one job. Every method may be repeated. All raise JobNotFound once the job is removed, also when
    another job was made under its name.

    Methods that write raise ServerRestarted after a restart of the server, until a new history has begun.
    """

    def __init__(
        self, call: Call, keys: JobKeys, shards: int, safely: Safely | None = None, owns: Safely | None = None
    ) -> None:
        """`safely` runs what was acknowledged to a worker, `owns` what makes an aggregator the owner of a slot."""
        self._call = call
        self._keys = keys
        self._shards = shards
        self._safely = safely
        self._owns = owns

    def through(self, call: Call) -> JobScripts:
        """Return the same scripts, run by another call."""
        return JobScripts(call, self._keys, self._shards)

    def _lasting(self, history: str = "") -> Call:
        """Return the call for a script whose effect must outlive a failover, where the job asks for that."""
        return partial(self._safely, self.mark(history)) if self._safely else self._call

    def mark(self, history: str = "") -> tuple[object, ...]:
        """Return `sync` as a command: once a replica has its write, it has all that was written before."""
        k = self._keys
        return ("EVALSHA", SCRIPTS["sync"].sha, 3, k.version, k.sync, k.never, k.id, history)

    def _run(self, script: str, keys: Sequence[str], *args: object, call: Call | None = None) -> list[Any]:
        """Run a script on the version hash and `keys`, for the job of this id."""
        return self._evaluate(script, [self._keys.version, *keys], self._keys.id, *args, call=call)

    def _evaluate(
        self, script: str, keys: Sequence[str], *args: object, call: Call | None = None, never: str = ""
    ) -> list[Any]:
        """Run a script. `never` is a key that never exists, in the slot of `keys`."""
        keys, call = [*keys, never or self._keys.never], call or self._call
        return self._answered(evaluate(call, SCRIPTS, script, keys, *args, load=self._call))

    def _request(
        self, script: str, keys: Sequence[str], args: Sequence[object], parse: Callable[[list[Any]], T]
    ) -> Request[T]:
        """Return the call of a script on the version hash and `keys`, for the job of this id."""
        keys = [self._keys.version, *keys, self._keys.never]
        command = ("EVALSHA", SCRIPTS[script].sha, len(keys), *keys, self._keys.id, *args)
        return Request(command, lambda reply: parse(self._answered(reply)))

    def _send(self, request: Request[T]) -> T:
        return request.parse(with_scripts(self._call, SCRIPTS, lambda: list(self._call(*request.command))))

    def _answered(self, reply: list[Any]) -> list[Any]:
        if reply[0] == "NOJOB":
            raise job_not_found(self._keys.job)
        if reply[0] == "ANOTHER":
            raise made_anew(self._keys.job)
        if reply[0] == "RESTARTED":
            raise ServerRestarted
        if reply[0] == "WRONGTYPE":
            _, key, found, want = reply
            raise CorruptData(f"key {key} is a {found}, not a {want}: another program wrote there")
        return reply

    def create(self, config: JobConfig, layout: Layout, name: str, run_id: str, checkpoint: str = "") -> None:
        """Make the job, whose first version (0, or a JSON `checkpoint`'s) is staged as `name`. Raises JobExists."""
        k = self._keys
        fields = [part for pair in config.to_hash().items() for part in pair]
        keys = [k.version, k.config, k.layout, k.commits, k.removed, k.clock, k.skip, k.workers, k.units, k.free_units]
        keys += [k.rounds, k.pushed, k.draining, k.finished, k.ranks]
        args = [k.id, layout.to_json(), run_id, name, layout.shards, checkpoint, *fields]
        reply = self._evaluate("create", keys, *args, call=self._lasting())
        if reply[0] == "EXISTS":
            raise job_exists(k.job)
        if reply[0] == "REMOVED":
            raise being_removed(k.job)

    def join(self, worker: str, nonce: str, replaces: str, process: Mapping[str, Any]) -> Joined:
        """Begin an incarnation. Raises WorkerAlive, and UsageError if the job has all its workers."""
        k = self._keys
        keys = [k.config, k.workers, k.clock, k.skip, k.heartbeat, k.plan, k.commits, k.units, k.free_units, k.rounds]
        keys += [k.pushed, k.draining, k.finished, k.ranks, k.turns]
        reply = self._run("join", keys, worker, nonce, replaces, json.dumps(process))
        if reply[0] == "ALIVE":
            entry = Fields.of_json(reply[1], f"worker {worker!r}", deepest=1)
            pid, host, _ = entry.whole("pid", high=2**31), entry.text("host"), entry.word("incarnation")
            raise WorkerAlive(
                f"worker {worker!r} of job {k.job!r} lives (process {pid} on {host}): choose another id, or stop that "
                f"one first",
                entry.as_dict(),
            )
        if reply[0] == "COMPLETE":
            raise UsageError(f"job {k.job!r} has all its workers ({_some(sorted(reply[1:]))}): join as one of them")
        match reply[1:]:
            case [int(rank), str(incarnation), int(round_), int(clock), int(pending), str(residual), weight_sum]:
                weights = whole(weight_sum, f"the weights of worker {worker!r}")
                return Joined(rank, incarnation, round_, clock, pending, residual, weights)
        raise _damaged(f"{k.workers} (worker {worker!r})")

    def reserve(self) -> str:
        """Return an id for a worker that has none; "" if a worker may have to be replaced, or all have joined."""
        k = self._keys
        reply = self._run("reserve", [k.config, k.workers, k.pushed, k.heartbeat])
        return str(reply[1]) if reply[0] == "OK" else ""

    def push(
        self,
        worker: str,
        incarnation: str,
        seq: int,
        base: int,
        weight: int,
        digest: str,
        history: str,
        unit: int | None = None,
        traces: Sequence[str] = (),
        part: str = "",
    ) -> Accepted:
        """Accept a contribution of a `part` of the model whose bytes are stored; note `traces`. Raises WorkerEvicted,
        WrongOrder, InboxFull, ContributionLate."""
        said = (base, weight, digest, history, "" if unit is None else unit)
        accepted = self._push(worker, incarnation, seq, *said, "", part, *traces)
        assert accepted is not None
        return accepted

    def ask(self, worker: str, incarnation: str, seq: int) -> Accepted | None:
        """Return the acceptance of a push whose reply was lost; None if it was not accepted. Changes nothing. Raises
        ContributionLate if it was dropped."""
        return self._push(worker, incarnation, seq, 0, 0, "-", "", "", "ask", "")

    def _push(self, worker: str, incarnation: str, seq: int, *said: object) -> Accepted | None:
        k = self._keys
        reply = self._run(
            "push",
            [k.config, k.workers, k.clock, k.skip, k.heartbeat, k.inbox, k.trace(worker), k.units, k.pushed, k.plan],
            worker,
            incarnation,
            seq,
            *said,
            call=self._lasting(),
        )
        match reply:
            case ["ACK", clock, round_, weight_sum]:
                return Accepted(clock, round_, whole(weight_sum, f"the weights of worker {worker!r}"))
            case ["LATE", _]:
                raise ContributionLate(
                    f"a contribution of worker {worker!r} came late: job {k.job!r} has closed its round without it, "
                    f"and drops what is late; pull, and compute it on the new weights"
                )
            case ["NEW"]:
                return None
            case ["FULL", *_]:
                raise InboxFull
            case ["EVICTED", state]:
                raise evicted(worker, k.job, state)
            case ["HISTORY", _]:
                raise evicted(worker, k.job, "its server was restarted")
        raise WrongOrder(f"push {seq} of worker {worker!r} does not follow what was accepted: {reply}")

    def plan(self, known: Plan | None = None) -> Planned:
        """Open the next plan if the mode's condition holds. Return the open plan; a `known` one is not read again."""
        k = self._keys
        reply = self._run(
            "plan",
            [k.config, k.workers, k.inbox, k.plan, k.pin, k.rounds, k.pushed, k.draining, k.finished],
            *((known.id, known.history) if known else ("", "")),
        )
        match reply:
            case ["OPEN", int(version), str(pin), int(members), *text]:
                return Planned(version, pin, members, Plan.from_json(text[0] if text else None), False)
            case ["GRACE", int(version), str(pin), int(members), int(grace_ms)]:
                return Planned(version, pin, members, None, False, grace_ms)
            case [str(code), int(version), str(pin), int(members)]:
                return Planned(version, pin, members, known if code == "SAME" else None, code == "EARLY")
        raise _damaged(k.version)

    def ready(self, shard: int, term: str, plan: Plan, digest: str) -> CommitResult:
        """Note that a shard's part is staged. Raises LeaseLost, and PlanGone if the plan is not open any more."""
        k = self._keys
        keys = [k.config, k.clock, k.skip, k.inbox, k.plan, k.ready, k.commits, k.pin, k.units, k.free_units, k.rounds]
        keys += [k.draining, k.turns, *(k.term(i) for i in range(self._shards))]
        said = (shard, term, plan.id, plan.version, plan.head, plan.history, digest)
        reply = self._run("ready", keys, *said)
        match reply:
            case ["FLIPPED", _, pin, commit_id]:
                return CommitResult(True, pin, commit_id)
            case ["READY" | "ALREADY", _]:
                return CommitResult(False, "", "")
            case ["TERM", holds]:
                raise lease_lost(shard, k.job, holds)
            case ["NOPLAN" | "PLAN" | "HEAD" | "HISTORY", *_]:
                raise PlanGone
        raise CorruptData(f"shard {shard} of job {k.job!r} was staged twice by one term: {reply}")

    def norm(self, plan: Plan, sums: Mapping[int, Sequence[float]]) -> dict[int, tuple[float, ...]]:
        """Note the sums of squares of these shards' parts of the plan's gradient, and of each of its counting
        contributions; return those of all shards that are known. Raises PlanGone, CorruptData.
        """
        k = self._keys
        said = [word for shard, each in sums.items() for word in (shard, ",".join(map(repr, each)))]
        reply = self._run("norm", [k.plan, k.norms], plan.id, plan.history, self._shards, *said)
        if reply[0] == "PLAN":
            raise PlanGone
        found = list(map(str, reply[1:]))
        shards, all_sums = found[::2], [text.split(",") for text in found[1::2]]
        right = all(len(each) == len(plan.counting) + 1 and all(map(_FLOAT.fullmatch, each)) for each in all_sums)
        if not right or not all(map(_SHARD.fullmatch, shards)):
            raise _damaged(k.norms)
        return {int(shard): tuple(map(float, each)) for shard, each in zip(shards, all_sums, strict=True)}

    def reject(self, shard: int, term: str, plan: Plan, contribution: Contribution, reason: str) -> None:
        """Take a damaged contribution out of the plan, and log the reason. Raises LeaseLost, PlanGone."""
        k = self._keys
        reply = self._run(
            "reject",
            [k.inbox, k.plan, k.ready, k.commits, k.term(shard)],
            *(term, plan.id, contribution.text, reason),
        )
        if reply[0] == "TERM":
            raise lease_lost(shard, k.job, reply[1])
        if reply[0] == "PLAN":
            raise PlanGone

    def acquire(self, shard: int, holder: str, lease_ms: int, nonce: str) -> Acquired:
        """Take a shard's lease, unless another aggregator holds it."""
        k = self._keys
        keys = [k.lease(shard), k.term(shard), k.ready, k.leases]
        reply = self._run("acquire", keys, holder, lease_ms, nonce, shard)
        if reply[0] == "OK":
            return Acquired(reply[1], "", 0)
        return Acquired("", reply[1], reply[2] if reply[0] == "FUTURE" else 0)

    def own(self, shard: int, term: str) -> None:
        """Make `term` the one that may delete in the shard's slot. Raises LeaseLost."""
        k, call = self._keys, partial(self._owns, None) if self._owns else self._call
        reply = self._evaluate("own", [k.owner(shard)], term, call=call, never=k.never_in(shard))
        if reply[0] == "LOST":
            raise lease_lost(shard, self._keys.job, reply[1])

    def renew(self, shard: int, holder: str, term: str, lease_ms: int) -> bool:
        """Keep a lease, or with 0 give it up. False if it is another's."""
        return self._send(self.renewal(shard, holder, term, lease_ms))

    def renewal(self, shard: int, holder: str, term: str, lease_ms: int) -> Request[bool]:
        """Return `renew` as a request."""
        k = self._keys
        keys = [k.lease(shard), k.term(shard), k.leases]
        return self._request("renew", keys, (holder, term, lease_ms), lambda reply: bool(reply[0] == "OK"))

    def free(
        self, shard: int, term: str, run_id: str, dead: Sequence[str], reused: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Delete the `dead` keys of the shard's slot, and rename the `reused` ones: pairs of a dead key and a key that
        is stored next. Raises LeaseLost, ServerRestarted; the batch of 1,000 that was refused then changed nothing."""
        most = 1000
        batches = [(dead[i : i + most], reused[:0]) for i in range(0, len(dead), most)]
        batches += [(dead[:0], reused[i : i + most]) for i in range(0, len(reused), most)]
        for gone, pairs in batches:
            keys = [self._keys.owner(shard), *gone, *(key for pair in pairs for key in pair)]
            reply = self._evaluate("free", keys, term, run_id, len(gone), never=self._keys.never_in(shard))
            if reply[0] == "LOST":
                raise lease_lost(shard, self._keys.job, reply[1])

    def pin(self, ms: int) -> str:
        """Keep the bytes of a version for a slow reader. Return the pin as JSON."""
        k = self._keys
        return str(self._evaluate("pin", [k.pin], k.id, ms, k.version)[1])

    def pinning(self, ms: int) -> tuple[object, ...]:
        """Return `pin` as a command for a MULTI, to be sent within `with_scripts`."""
        k = self._keys
        return ("EVALSHA", SCRIPTS["pin"].sha, 2, k.pin, k.never, k.id, ms, k.version)

    def heartbeat(self, worker: str, incarnation: str, activity: str = "") -> None:
        """Give a sign of life, and say what the worker does. Raises WorkerEvicted."""
        k = self._keys
        reply = self._run("heartbeat", [k.workers, k.heartbeat, k.activity], worker, incarnation, activity)
        if reply[0] == "EVICTED":
            raise evicted(worker, self._keys.job, reply[1])

    def leave(
        self, worker: str, incarnation: str, finished: bool, traces: Sequence[str] = (), residual: str = ""
    ) -> None:
        """Leave the vector clock; accepted contributions still commit. `residual` is the name of the stored residual.

        Raises WorkerEvicted if this incarnation was out of the clock before and no later one has the id.
        """
        k = self._keys
        keys = [k.workers, k.heartbeat, k.commits, k.trace(worker), k.units, k.free_units, k.rounds, k.pushed]
        keys += [k.draining, k.finished, k.turns]
        said = (worker, incarnation, int(finished), residual, *traces)
        reply = self._run("leave", keys, *said, call=self._lasting())
        if reply[0] == "EVICTED":
            raise evicted(worker, k.job, reply[1])

    def next_unit(self, worker: str, incarnation: str) -> int | None:
        """Return the worker's unit, handed out now or before; None if none is free. Raises WorkerEvicted."""
        k = self._keys
        reply = self._run("next_unit", [k.config, k.workers, k.units, k.free_units], worker, incarnation)
        if reply[0] == "EVICTED":
            raise evicted(worker, k.job, reply[1])
        if reply[0] != "OK":
            return None
        return whole(reply[1] if len(reply) > 1 else None, f"the unit of worker {worker!r}")

    def evict(self, worker: str = "", incarnation: str = "", aggregator: str = "") -> Evicted:
        """Take silent workers out of the vector clock, and this incarnation, which is known to be dead. Note that the
        calling aggregator is there, if it is one."""
        return self._send(self.eviction(worker, incarnation, aggregator))

    def eviction(self, worker: str = "", incarnation: str = "", aggregator: str = "") -> Request[Evicted]:
        """Return `evict` as a request."""
        k = self._keys
        keys = [k.config, k.workers, k.heartbeat, k.commits, k.units, k.free_units, k.rounds, k.pushed, k.draining]
        keys += [k.turns, k.aggregators]
        args = (worker, incarnation, aggregator)
        return self._request("evict", keys, args, lambda reply: Evicted(reply[2:], reply[1]))

    def recover(self, run_id: str, history: str, remembered: int) -> tuple[int, str]:
        """Begin a new history on a restarted server, unless another process did. Return its first version and id."""
        k = self._keys
        shards = range(self._shards)
        keys = [k.workers, k.heartbeat, k.plan, k.ready, k.commits, k.units, k.free_units, k.pin, k.turns, k.rounds]
        keys += [k.lease(i) for i in shards] + [k.term(i) for i in shards]
        match self._run("recover", keys, run_id, history, remembered):
            case [_, int(version), str(now)]:
                return version, now
        raise _damaged(k.version)

    def mirror(self, term: str, run_id: str, record: str) -> None:
        """Note which version Redis was given, in a job over shared memory. Raises LeaseLost."""
        k = self._keys
        reply = self._run("mirror", [k.mirror, k.term(0)], term, run_id, record)
        if reply[0] == "TERM":
            raise lease_lost(0, k.job, reply[1])

    def rollback(
        self, term: str, history: str, memory: str, shard: int = 0, record: str = ""
    ) -> tuple[int, int] | None:
        """Continue from the version of a `record`, under a new history, in `memory`. Without one continue from what
        `mirror` noted. Raises LeaseLost.

        Returns that version and how many versions are lost; None if `mirror` noted none, or if another version than the
        one that the record replaces is there now.
        """
        k, shards = self._keys, range(self._shards)
        keys = [k.workers, k.heartbeat, k.plan, k.ready, k.commits, k.units, k.pin, k.clock, k.skip, k.inbox, k.mirror]
        keys += [k.turns, k.free_units, k.rounds, k.pushed, k.draining, k.finished, k.ranks, k.config]
        keys += [k.lease(i) for i in shards] + [k.term(i) for i in shards]
        reply = self._run("rollback", keys, shard, term, history, memory, record)
        if reply[0] == "TERM":
            raise lease_lost(shard, k.job, reply[1])
        return (int(reply[1]), int(reply[2])) if reply[0] == "OK" else None

    def replicas(self, ask: Callable[[Sequence[Any]], tuple[Any, int]], history: str) -> int:
        """Return how many replicas of the job's server have all that it has now, where `ask` runs a mark and counts
        them. Raises ServerRestarted, also if `history` has ended."""
        reply, found = with_scripts(self._call, SCRIPTS, lambda: ask(self.mark(history)))
        if self._answered(reply)[0] == "HISTORY":
            raise ServerRestarted
        return found

    def trace(self, shard: int, entries: Sequence[str]) -> None:
        """Append entries, "field value field value ...", to the trace of a shard."""
        self._run("trace", [self._keys.shard_trace(shard)], *entries)

    def trim(self, history: str, entry: str, version: int) -> int:
        """Delete the log before `entry`, the commit of `version`. Return how many entries; none in another history."""
        reply = self._run("trim", [self._keys.commits], history, entry, version)
        return int(reply[1]) if reply[0] == "OK" else 0

    def remove(self, workers: Sequence[str]) -> bool:
        """Delete all control keys in one step. From then on the job does not exist, and only its name is taken.

        Returns False, and deletes nothing, if other workers than `workers` have joined.
        """
        k = self._keys
        keys = [k.removed, k.workers, k.config, k.layout, k.clock, k.skip, k.heartbeat, k.inbox, k.plan, k.ready]
        keys += [
            k.commits,
            k.pin,
            k.units,
            k.free_units,
            k.leases,
            k.norms,
            k.mirror,
            k.sync,
            k.ranks,
            k.rounds,
            k.pushed,
            k.draining,
        ]
        keys += [k.finished, k.turns, k.activity, k.aggregators, *(k.trace(worker) for worker in workers)]
        for shard in range(self._shards):
            keys += [k.lease(shard), k.term(shard), k.wish(shard), k.shard_trace(shard)]
        return bool(self._run("remove", keys, len(workers))[0] == "OK")

    def forget(self) -> None:
        """Free the removed job's name, once its bytes are unlinked. Changes nothing if another job has the name."""
        self._evaluate("forget", [self._keys.removed], self._keys.id)


def job_not_found(job: str) -> JobNotFound:
    return JobNotFound(f"no job {job!r} on this server (any more): kvps jobs lists those there are")


def made_anew(job: str) -> JobNotFound:
    return JobNotFound(
        f"the job {job!r} that this process knew was removed, and another one has its name now: open that one anew"
    )


def being_removed(job: str) -> JobExists:
    return JobExists(f"job {job!r} is being removed: wait, or if that was cut short: kvps rm {job}")


def job_exists(job: str) -> JobExists:
    return JobExists(f"job {job!r} exists: choose another name, or remove it with: kvps rm {job}")


def lease_lost(shard: int, job: str, holds: str) -> LeaseLost:
    return LeaseLost(f"lost shard {shard} of job {job!r}: another aggregator holds it (term {holds or 'none'})")


def evicted(worker: str, job: str, why: str) -> WorkerEvicted:
    return WorkerEvicted(
        f"worker {worker!r} is no longer in job {job!r} ({why}): what it had acknowledged counts, join again to go on"
    )


def _damaged(key: str) -> CorruptData:
    return CorruptData(f"key {key} is damaged: another program, or another version of kvps, wrote there")


def _some(names: Sequence[str]) -> str:
    """Join names for a message; of more than 8, only the first 7."""
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:7])} and {len(names) - 7} others"
