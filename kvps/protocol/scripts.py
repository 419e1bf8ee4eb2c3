"""The Lua scripts as typed methods: the only module that gives them arguments and reads their answers.

The header of each `.lua` file says what the script does and what it may answer. Here every answer becomes a value or an
error of `kvps.errors`. A script answers a repeat as it answered the first time, so a `Call` whose reply was lost is
simply made again (redis-py's own retries are off).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.errors import ContributionLate, CorruptData, ItemsRefused, UsageError, WorkerAlive, WrongOrder, some_of
from kvps.machine.process import is_this
from kvps.parsing import Fields, whole
from kvps.protocol.answers import (
    Accepted,
    Acquired,
    CommitResult,
    Evicted,
    InboxFull,
    Joined,
    NextUnit,
    PlanGone,
    Planned,
    RunOver,
    ServerRestarted,
    UnitDone,
    being_removed,
    damaged,
    evicted,
    job_exists,
    job_not_found,
    lease_lost,
    made_anew,
)
from kvps.protocol.job_state import State
from kvps.protocol.keys import JobKeys
from kvps.protocol.lua_scripts import Call, Request, T, evaluate, load_scripts, with_scripts
from kvps.protocol.plan import Contribution, Plan
from kvps.protocol.run_control import RunControl

Safely = Callable[..., Any]
"""Runs a mark and a command as `kvps.connection.client.Client.call_safely` does."""
_SHARD = re.compile(r"[0-9]{1,4}")
_FLOAT = re.compile(r"[0-9]{1,309}(\.[0-9]{1,30})?(e[+-]?[0-9]{1,3})?|inf|nan")
_MOST_FREED = 1000  # keys, or pairs of keys, in one call of free.lua
SCRIPTS = load_scripts("kvps.protocol")


def run_in(values: Sequence[Any]) -> RunControl:
    """Return what the job does, from an answer that says it."""
    names = ("run", "run_by", "run_reason", "run_at_ms")
    fields = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    return RunControl.of(Fields(fields, "the version"))


class Said(NamedTuple):
    """What a learner says of a version that it publishes: the loss of the weights, None for none; the nonce of its
    call; and the lots of experience that the version is trained on."""

    loss: float | None
    nonce: str
    trained: Sequence[str] = ()


class JobScripts:
    """The scripts of one job. Every method may be repeated. All raise JobNotFound once the job is removed, also when
    another job was made under its name.

    Methods that write raise ServerRestarted after a restart of the server, until a new history has begun.
    """

    def __init__(
        self,
        call: Call,
        keys: JobKeys,
        shards: int,
        safely: Safely | None = None,
        owns: Safely | None = None,
        lacking: Callable[[Any], Any] = lambda error: error,
    ) -> None:
        """`safely` runs what was acknowledged to a worker, `owns` what makes an aggregator the owner of a slot.
        `lacking` is `kvps.connection.client.Client.lacking`."""
        self._call = call
        self._keys = keys
        self._shards = shards
        self._safely = safely
        self._owns = owns
        self._lacking = lacking

    def through(self, call: Call) -> JobScripts:
        """Return the same scripts, run by another call."""
        return JobScripts(call, self._keys, self._shards, lacking=self._lacking)

    def mark(self, history: str = "") -> tuple[object, ...]:
        """Return `sync` as a command: once a replica has its write, it has all that was written before."""
        return self._command("sync", history=history)

    def pinning(self, ms: int) -> tuple[object, ...]:
        """Return `pin` as a command for a MULTI, to be sent within `with_scripts`."""
        return self._command("pin", ms=ms, version_key=self._keys.version)

    def _command(self, script: str, /, **values: object) -> tuple[Any, ...]:
        """Return a script with these arguments as a command. Each may take the job's id, and its number of shards."""
        values["job"], values["shards"] = self._keys.id, self._shards
        return SCRIPTS[script].command(self._keys, values)

    def _run(self, script: str, /, *, call: Call | None = None, **values: object) -> list[Any]:
        """Run a script with these arguments, by another `call` if one is given."""
        command = self._command(script, **values)
        reply = evaluate(call or self._call, SCRIPTS, command, load=self._call)
        return self._answered(reply, values.get("worker", values.get("actor")), values.get("shard"))

    def run(self, script: str, /, *, lasting: bool = False, **values: object) -> list[Any]:
        """Run another script with these arguments, and return its answer, unless several scripts answer like that and
        it stands for an error. With `lasting` its effect outlives a failover, where the job asks for that."""
        return self._run(script, call=self._lasting() if lasting else None, **values)

    def _request(self, script: str, parse: Callable[[list[Any]], T], /, **values: object) -> Request[T]:
        """Return the call of a script, where `parse` makes a value of its answer."""
        worker = values.get("worker") or values.get("actor")
        return Request(self._command(script, **values), lambda reply: parse(self._answered(reply, worker)))

    def _send(self, request: Request[T]) -> T:
        return request.parse(evaluate(self._call, SCRIPTS, request.command))

    def _answered(self, reply: list[Any], worker: object = None, shard: Any = None) -> list[Any]:
        """Return the reply to a script about this worker or this shard. Raises what several scripts answer alike."""
        match reply:
            case ["EVICTED", "unknown"]:
                raise self._lacking(evicted(str(worker), self._keys.job, "unknown"))
            case ["EVICTED", state]:
                raise evicted(str(worker), self._keys.job, state)
            case ["NOJOB"]:
                raise self._lacking(job_not_found(self._keys.job))
            case ["ANOTHER"]:
                raise made_anew(self._keys.job)
            case ["RESTARTED"]:
                raise ServerRestarted
            case ["TERM", holds]:
                raise lease_lost(shard, self._keys.job, holds)
            case ["PLAN" | "NOPLAN", *_]:
                raise PlanGone
            case ["WRONGTYPE", key, present, want]:
                raise CorruptData(f"key {key} is a {present}, not a {want}: another program wrote there")
        return reply

    def _lasting(self) -> Call:
        """Return the call for a script whose effect must outlive a failover, where the job asks for that."""
        return partial(self._safely, self.mark()) if self._safely else self._call

    def create(self, config: JobConfig, layout: Layout, name: str, run_id: str, checkpoint: str = "") -> None:
        """Make the job, whose first version (0, or a JSON `checkpoint`'s) is staged as `name`. Raises JobExists."""
        settings = [part for pair in config.stored.items() for part in pair]
        first = {"layout": layout.to_json(), "name": name, "checkpoint": checkpoint, "settings": settings}
        reply = self._run("create", call=self._lasting(), run_id=run_id, **first)
        if reply[0] == "EXISTS":
            raise job_exists(self._keys.job)
        if reply[0] == "REMOVED":
            raise being_removed(self._keys.job)

    def join(self, worker: str, nonce: str, replaces: str, process: Mapping[str, Any]) -> Joined:
        """Begin an incarnation. Raises WorkerAlive, and UsageError if the job has all its workers."""
        job = self._keys.job
        match self._run("join", worker=worker, nonce=nonce, replaces=replaces, process=json.dumps(process)):
            case ["OK", int(rank), str(incarnation), int(round_), int(clock), int(pending), str(residual), str(state)]:
                return Joined(rank, incarnation, round_, clock, pending, residual, state)
            case ["ALIVE", text]:
                entry = Fields.of_json(text, f"worker {worker!r}", deepest=1)
                pid, host, _ = entry.whole("pid", high=2**31), entry.text("host"), entry.word("incarnation")
                lives = f"lives (process {pid} on {host}): choose another id, or stop that one first"
                if is_this(entry.as_dict()):
                    lives = "has joined in this very process: close its session or optimizer before it joins again"
                raise WorkerAlive(f"worker {worker!r} of job {job!r} {lives}", entry.as_dict())
            case ["PUBLISHED"]:
                raise UsageError(f"job {job!r} has no workers: a learner publishes its weights; see Store.watch")
            case ["COMPLETE", *workers]:
                raise UsageError(f"job {job!r} has all its workers ({some_of(sorted(workers))}): join as one of them")
        raise damaged(f"{self._keys.workers} (worker {worker!r})")

    def reserve(self) -> str:
        """Return an id for a worker that has none; "" if a worker may have to be replaced, or all have joined."""
        reply = self._run("reserve")
        return "" if reply[0] == "LOOK" else str(reply[1])

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
        lacks: str = "",
        state: str = "",
    ) -> Accepted:
        """Accept a contribution of a `part` of the model whose bytes are stored, and that `lacks` parameters, with the
        worker's `state` if that has changed; note `traces`.

        Raises WorkerEvicted, WrongOrder, InboxFull, ContributionLate, UnitDone, RunOver.
        """
        values = {"base": base, "weight": weight, "digests": digest, "history": history, "part": part, "lacks": lacks}
        values["state"] = state
        accepted = self._push(
            worker, incarnation, seq, mode="", unit="" if unit is None else unit, traces=traces, **values
        )
        assert accepted is not None
        return accepted

    def ask(self, worker: str, incarnation: str, seq: int) -> Accepted | None:
        """Return the acceptance of a push whose reply was lost; None if it was not accepted. Changes nothing. Raises
        ContributionLate if it was dropped."""
        nothing = {"base": 0, "weight": 0, "digests": "-", "traces": ()}
        empty = dict.fromkeys(("history", "part", "lacks", "unit", "state"), "")
        return self._push(worker, incarnation, seq, mode="ask", **nothing, **empty)

    def _push(self, worker: str, incarnation: str, seq: int, **values: Any) -> Accepted | None:
        job, call = self._keys.job, self._lasting()
        reply = self._run("push", call=call, worker=worker, incarnation=incarnation, seq=seq, **values)
        match reply:
            case ["ACK", clock, round_, more_units]:
                return Accepted(clock, round_, more_units == 1)
            case ["DUPLICATE", _]:
                raise UnitDone(f"another worker of job {job!r} has pushed the unit of {worker!r} before")
            case ["LATE", _]:
                raise ContributionLate(
                    f"a contribution of worker {worker!r} came late: job {job!r} has closed its round without it, "
                    f"and drops what is late; pull, and go on with the round that is open"
                )
            case ["STOPPED", *run]:
                raise RunOver(run_in(run))
            case ["NEW"]:
                return None
            case ["FULL", _]:
                raise InboxFull
            case ["HISTORY", _]:
                raise evicted(worker, job, "its server was restarted")
            case ["SEQUENCE" | "BASE" | "UNIT" | "BAD", *_]:
                raise WrongOrder(f"push {seq} of worker {worker!r} does not follow what was accepted: {reply}")
        raise damaged(f"{self._keys.workers} (worker {worker!r})")

    def plan(self, known: Plan | None = None) -> Planned:
        """Open the next plan if the mode's condition holds. Return the open plan; a `known` one is not read again."""
        known_id, known_history = (known.id, known.history) if known else ("", "")
        match self._run("plan", known_id=known_id, known_history=known_history):
            case ["OPEN", int(version), str(pin), int(members), *text]:
                return Planned(version, pin, members, Plan.from_json(text[0] if text else None), False)
            case ["GRACE", int(version), str(pin), int(members), int(grace_ms)]:
                return Planned(version, pin, members, None, False, grace_ms)
            case ["SAME" | "IDLE" | "EARLY" as code, int(version), str(pin), int(members)]:
                return Planned(version, pin, members, known if code == "SAME" else None, code == "EARLY")
        raise damaged(self._keys.version)

    def publish(self, term: str, state: State, by: str, said: Said) -> Plan | None:
        """Open the plan of the version behind `state`, which a learner has made, and return it; None if the job has
        such a version already. `term` is that of shard 0. Raises LeaseLost, PlanGone if the job is not in that state
        any more, RunOver, UsageError for a job of workers, ItemsRefused."""
        values: dict[str, Any] = {"version": state.version + 1, "head": state.head, "history": state.history}
        values |= {"by": by, "loss": "" if said.loss is None else repr(said.loss), "nonce": said.nonce}
        reply = self._run("publish", shard=0, term=term, trained=said.trained, **values)
        match reply:
            case ["OPEN", int(_), str(text)]:
                return Plan.from_json(text)
            case ["MADE", _]:
                return None
            case ["HEAD" | "HISTORY", *_]:
                raise PlanGone
            case ["STOPPED", *run]:
                raise RunOver(run_in(run))
            case ["STALE", lot]:
                raise ItemsRefused(
                    f"{lot} is too old for version {state.version + 1} of job {self._keys.job!r} by max_staleness: "
                    f"publish what was trained on fresher items; what is too old is dropped by the next take"
                )
            case ["TAKEN", lot]:
                raise ItemsRefused(
                    f"{lot or 'what the version is trained on'} is not taken by this learner any more: take other items"
                )
            case ["NONE"]:
                raise UsageError(f"job {self._keys.job!r} takes no experience")
            case ["TRAINED"]:
                raise UsageError(f"job {self._keys.job!r} is trained by its workers: no learner publishes it")
            case ["BY"]:
                raise UsageError(
                    f"a learner's name has 1 to 300 of A-Z, a-z, 0-9, dots, colons, _ and -, not {by[:60]!r}"
                )
        raise damaged(self._keys.plan)

    def ready(self, shard: int, term: str, plan: Plan, digest: str) -> CommitResult:
        """Note that a shard's part is staged. Raises LeaseLost, and PlanGone if the plan is not open any more."""
        of_plan: dict[str, Any] = {"plan_id": plan.id, "version": plan.version, "head": plan.head}
        reply = self._run("ready", shard=shard, term=term, digest=digest, history=plan.history, **of_plan)
        match reply:
            case ["FLIPPED", _, pin, commit_id]:
                return CommitResult(True, pin, commit_id)
            case ["READY" | "ALREADY", _]:
                return CommitResult(False, "", "")
            case ["HEAD" | "HISTORY" | "TAKEN", *_]:
                raise PlanGone
            case ["DIGEST", _]:
                raise CorruptData(f"shard {shard} of job {self._keys.job!r} was staged twice by one term: {reply}")
        raise damaged(self._keys.ready)

    def norm(self, plan: Plan, sums: Mapping[int, Sequence[float]]) -> dict[int, tuple[float, ...]]:
        """Note the sums of squares of these shards' parts of the plan's gradient, and of as many of its contributions
        as each shard has measured. Return those of all shards; {} while some are missing. Raises PlanGone, CorruptData.
        """
        noted = [word for shard, each in sums.items() for word in (shard, ",".join(map(repr, each)))]
        reply = self._run("norm", plan_id=plan.id, history=plan.history, sums=noted)
        if reply[0] == "SOME":
            return {}
        known = list(map(str, reply[1:]))
        all_sums = dict(zip(known[::2], (text.split(",") for text in known[1::2]), strict=True))
        del all_sums["mark"]
        lengths = {len(each) for each in (*all_sums.values(), *sums.values())}
        right = len(lengths) == 1 and all(map(_FLOAT.fullmatch, chain.from_iterable(all_sums.values())))
        if not right or not all(map(_SHARD.fullmatch, all_sums)):
            raise damaged(self._keys.square_sums)
        return {int(shard): tuple(map(float, each)) for shard, each in all_sums.items()}

    def reject(
        self, shard: int, term: str, plan: Plan, contribution: Contribution, reason: str, damaged: bool = False
    ) -> None:
        """Take a contribution out of the plan, and log the reason. In rounds of units, one whose bytes are `damaged` is
        computed again. Raises LeaseLost, PlanGone."""
        why: dict[str, Any] = {"contribution": contribution.text, "reason": reason, "damaged": int(damaged)}
        self._run("reject", shard=shard, term=term, plan_id=plan.id, **why)

    def acquire(self, shard: int, holder: str, lease_ms: int, nonce: str) -> Acquired:
        """Take a shard's lease, unless another aggregator holds it."""
        match self._run("acquire", shard=shard, holder=holder, lease_ms=lease_ms, nonce=nonce):
            case ["OK", term]:
                return Acquired(term, "", 0)
            case ["HELD", other, _]:
                return Acquired("", other, 0)
            case ["FUTURE", other, future_ms]:
                return Acquired("", other, future_ms)
        raise damaged(self._keys.lease(shard))

    def own(self, shard: int, term: str) -> None:
        """Make `term` the one that may delete in the shard's slot. Raises LeaseLost."""
        call = partial(self._owns, None) if self._owns else self._call
        reply = self._run("own", call=call, shard=shard, term=term)
        if reply[0] == "LOST":
            raise lease_lost(shard, self._keys.job, reply[1])

    def renew(self, shard: int, holder: str, term: str, lease_ms: int) -> bool:
        """Keep a lease, or with 0 give it up. False if another aggregator has it."""
        return self._send(self.renewal(shard, holder, term, lease_ms))

    def beat_of(self, actor: str, incarnation: str) -> tuple[object, ...]:
        """Return an actor's sign of life as a command."""
        return self._command("enter", actor=actor, incarnation=incarnation, nonce="", process="")

    def renewal(self, shard: int, holder: str, term: str, lease_ms: int) -> Request[bool]:
        """Return `renew` as a request."""
        values = {"shard": shard, "holder": holder, "term": term, "lease_ms": lease_ms}
        return self._request("renew", lambda reply: bool(reply[0] != "LOST"), **values)

    def free(
        self, shard: int, term: str, run_id: str, dead: Sequence[str], reused: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Delete the `dead` keys of the shard's slot, and rename the `reused` ones: pairs of a dead key and a key that
        is stored next. Raises LeaseLost, ServerRestarted; the batch of 1,000 that was refused then changed nothing."""
        most = _MOST_FREED
        batches = [(dead[i : i + most], reused[:0]) for i in range(0, len(dead), most)]
        batches += [(dead[:0], reused[i : i + most]) for i in range(0, len(reused), most)]
        for gone, pairs in batches:
            keys = [*gone, *(key for pair in pairs for key in pair)]
            reply = self._run("free", shard=shard, term=term, run_id=run_id, dead=keys, deletions=len(gone))
            if reply[0] == "LOST":
                raise lease_lost(shard, self._keys.job, reply[1])

    def pin(self, ms: int) -> str:
        """Keep the bytes of a version for a slow reader. Return the pin as JSON."""
        return str(self._run("pin", ms=ms, version_key=self._keys.version)[1])

    def heartbeat(self, worker: str, incarnation: str, activity: str = "") -> None:
        """Give a sign of life, and say what the worker does. Raises WorkerEvicted."""
        self._run("heartbeat", worker=worker, incarnation=incarnation, phase=activity)

    def sign_of_life(self, worker: str, incarnation: str, activity: str) -> tuple[object, ...]:
        """Return `heartbeat` as a command."""
        return self._command("heartbeat", worker=worker, incarnation=incarnation, phase=activity)

    def leave(
        self, worker: str, incarnation: str, finished: bool, traces: Sequence[str] = (), residual: str = ""
    ) -> None:
        """Leave the vector clock; accepted contributions still commit. `residual` is the name of the stored residual.

        Raises WorkerEvicted if this incarnation was out of the clock before and no later one has the id.
        """
        values = {"finished": int(finished), "residual": residual, "traces": traces}
        self._run("leave", call=self._lasting(), worker=worker, incarnation=incarnation, **values)

    def next_unit(self, worker: str, incarnation: str) -> NextUnit:
        """Return the worker's unit, handed out now or before. Raises WorkerEvicted."""
        return self._send(self.unit_request(worker, incarnation))

    def unit_request(self, worker: str, incarnation: str) -> Request[NextUnit]:
        """Return `next_unit` as a request."""

        def parse(reply: list[Any]) -> NextUnit:
            match reply:
                case ["OK", *unit]:
                    return NextUnit(whole(unit[0] if unit else None, f"the unit of worker {worker!r}"))
                case ["NONE", int(backup_ms)]:
                    return NextUnit(None, backup_ms)
                case ["DONE"]:
                    return NextUnit(None, done=True)
                case ["STOPPED", *run]:
                    return NextUnit(None, ends=run_in(run))
            raise damaged(self._keys.units)

        return self._request("next_unit", parse, worker=worker, incarnation=incarnation)

    def control(self, what: str, by: str = "", reason: str = "", lr: str = "") -> RunControl:
        """Stop, suspend or pause the job, have it go on (`resume`), or `set` its learning rate, unless that is so.
        Return what it does now."""
        reply = self._run("control", call=self._lasting(), what=what, by=by, reason=reason, lr=lr)
        return run_in(reply[1:])

    def evict(self, worker: str = "", incarnation: str = "", reason: str = "") -> Evicted:
        """Take silent workers out of the vector clock, and this incarnation for a reason that the log says."""
        return self._send(self.eviction(worker, incarnation, reason))

    def eviction(
        self, worker: str = "", incarnation: str = "", reason: str = "", aggregator: str = ""
    ) -> Request[Evicted]:
        """Return `evict` as a request. It notes that the calling aggregator is there, if it is one."""
        values = {"dead": worker, "incarnation": incarnation, "reason": reason, "aggregator": aggregator}
        return self._request("evict", lambda reply: Evicted(reply[2:], reply[1]), **values)

    def adopt(self, before: str, launched_by: str, by: str, ended: Mapping[str, str]) -> bool:
        """Note another launcher of the job; return False if it has got yet another one. `ended` is worker ->
        incarnation of processes that have ended: they are awaited."""
        pairs = list(chain.from_iterable(ended.items()))
        reply = self._run("adopt", before=before, launched_by=launched_by, by=by, ended=pairs)
        return bool(reply[0] != "OTHER")

    def recover(self, run_id: str, history: str, remembered: int) -> tuple[int, str]:
        """Begin a new history on a restarted server, unless another process did. Return its first version and id."""
        match self._run("recover", run_id=run_id, history=history, remembered=remembered):
            case [_, int(version), str(now)]:
                return version, now
        raise damaged(self._keys.version)

    def mirror(self, term: str, run_id: str, record: str) -> None:
        """Note which version Redis was given, in a job over shared memory. Raises LeaseLost."""
        self._run("mirror", shard=0, term=term, run_id=run_id, record=record)

    def rollback(
        self, term: str, history: str, memory: str, shard: int = 0, record: str = ""
    ) -> tuple[int, int] | None:
        """Continue from the version of a `record`, under a new history, in `memory`. Without one continue from what
        `mirror` noted. Raises LeaseLost.

        Returns that version and how many versions are lost; None if `mirror` noted none, or if another version than the
        one that the record replaces is there now.
        """
        match self._run("rollback", shard=shard, term=term, history=history, memory=memory, record=record):
            case ["OK", version, lost]:
                return int(version), int(lost)
            case ["HEAD" | "NOMIRROR", *_]:
                return None
        raise damaged(self._keys.version)

    def replicas(self, ask: Callable[[Sequence[Any]], tuple[Any, int]], history: str) -> int:
        """Return how many replicas of the job's server have all that it has now, where `ask` runs a mark and counts
        them. Raises ServerRestarted, also if `history` has ended."""
        reply, replicas = with_scripts(self._call, SCRIPTS, lambda: ask(self.mark(history)))
        if self._answered(reply)[0] == "HISTORY":
            raise ServerRestarted
        return replicas

    def trace(self, shard: int, entries: Sequence[str]) -> None:
        """Append entries, "field value field value ...", to the trace of a shard."""
        self._run("trace", shard=shard, entries=entries)

    def report(self, version: int, figures: str, by: str, nonce: str) -> int:
        """Note an evaluation of a version, whose `figures` are JSON; return its time, in ms since 1970. Raises
        UsageError for a version that the job has not made."""
        values: dict[str, Any] = {"version": version, "figures": figures, "by": by, "nonce": nonce}
        match self._run("report", version_key=self._keys.version, **values):
            case ["OK", at_ms]:
                return whole(at_ms, "the time of an evaluation")
            case ["AHEAD", present]:
                raise UsageError(f"job {self._keys.job!r} has no version {version:,} yet: its newest is {present}")
        raise damaged(self._keys.evaluation)

    def trim(self, history: str, entry: str, version: int) -> int:
        """Delete the log before `entry`, the commit of `version`. Return how many entries; none in another history."""
        reply = self._run("trim", history=history, entry=entry, version=version)
        return 0 if reply[0] == "HISTORY" else int(reply[1])

    def remove(self, workers: Sequence[str]) -> bool:
        """Delete all control keys in one step. From then on the job does not exist, and only its name is taken.

        Returns False, and deletes nothing, if other workers than `workers` have joined.
        """
        control = self._keys.all_control(workers, self._shards)
        return bool(self._run("remove", control=control, known_workers=len(workers))[0] != "MORE")

    def forget(self) -> None:
        """Free the removed job's name, once its bytes are unlinked. Changes nothing if another job has the name."""
        self._run("forget")
