"""Every key that kvps uses; no other module spells one.

``{job}`` and ``{job/id/shard/}`` are Redis Cluster hash tags: everything that must change together is in the slot of
the job, and bytes are in the slot of their shard. The last slash is for CRC-16: without it, shards 0 and 1 of any job
are in the same half of all slots, and so on one of two masters.

    key                                    type    written by          what it holds
    kvps:jobs                              set     store               names of jobs, for listing only
    kvps:preflight                         string  client              nothing: set for 1 s to test that writing works
    kvps:memory                            hash    store               run id of the server -> the shared memory that
                                                                       its first job over shm is in: `auto` takes no
                                                                       other; deleted with the last job
    kvps:{job}:config                      hash    create, adopt.lua   readable fields: settings, metadata
    kvps:{job}:made_with                   hash    create.lua          the fields of config, without launched_by and
                                                                       memory, as they were then: a process compares
                                                                       them before it imports what they name
    kvps:{job}:layout                      string  create.lua          JSON: parameters, buffers, dtype, shapes, shards
    kvps:{job}:version                     hash    create, ready,      version, head, id, history, run_id (the server's
                                                   recover, trim,      when that history began), plan_id;
                                                   plan, control.lua   contributions (the sum of the clock), furthest
                                                                       (the highest committed round), free_rank and
                                                                       free_id (all lower ones are taken);
                                                                       shard:<i> and before:<i>: staged name now
                                                                       and one version ago; from_version, from_head,
                                                                       from_contributions: the checkpoint's, if the
                                                                       job was restored; moved: the version with whose
                                                                       commit the log begins, if others were moved or
                                                                       deleted; began: the first join, ms;
                                                                       graced: the inbox id whose arrival lay in the
                                                                       future, and the time it counts from, ms;
                                                                       run: "pause", or "suspend" or "stop" and the last
                                                                       round, with run_by, run_reason and run_at_ms, if
                                                                       somebody has asked for that; lr: the learning
                                                                       rate that was set
    kvps:{job}:clock                       hash    join, ready,        worker -> contributions committed
                                                   create.lua
    kvps:{job}:skip                        hash    join, push, ready,  worker -> rounds it skips: it was away, or late,
                                                   create.lua          or its contribution was rejected
    kvps:{job}:workers                     hash    join, push, leave,  worker -> JSON: rank, incarnation, state
                                                   evict, recover,     (active, rejoining, left, evicted), accepted,
                                                   next_unit.lua,      round (the last accepted; pending is round -
                                                   create.lua          clock - skip), finished, awaited (not joined yet
                                                                       since the restore), residual (the name of its
                                                                       stored residual and inner state, if they belong
                                                                       to all accepted), host, pid, device
    kvps:{job}:ranks                       hash    join.lua            rank -> worker
    kvps:{job}:rounds                      zset    join, push, ready,  worker that is not gone -> its last committed
                                                   leave, evict.lua    round: the bound compares with the lowest
    kvps:{job}:pushed                      zset    join, push,         worker in the vector clock -> its last accepted
                                                   leave, evict.lua    round: in BSP the lowest says which round is due
    kvps:{job}:draining                    zset    leave, evict,       worker -> the round whose commit makes it gone
                                                   ready, join.lua
    kvps:{job}:finished                    set     leave, join.lua     workers that have done all their rounds
    kvps:{job}:heartbeat                   zset    join, push,         worker -> server time of its last sign of
                                                   heartbeat.lua       life, ms; "" -> server time of the last look by
                                                                       an aggregator
    kvps:{job}:activity                    hash    heartbeat.lua       worker -> the phase of its iteration at its last
                                                                       sign of life, and since when, microseconds
    kvps:{job}:turns                       stream  ready, join,        capped: the lowest committed round, each time it
                                                   leave, evict,       changes; wakes the workers that wait
                                                   recover, control.lua
    kvps:{job}:aggregators                 zset    evict.lua           aggregator, also one that stands by -> server
                                                                       time of its last look for silent workers, ms
    kvps:{job}:lease:<shard>               string  acquire, renew.lua  the holder; expires, for liveness
    kvps:{job}:term:<shard>                string  acquire.lua         the fencing token; never expires, for safety
    kvps:{job}:wish:<shard>                string  aggregator          who is near the shard's bytes and waits for its
                                                                       holder, who gives it up if not near; expires
    kvps:{job}:leases                      stream  acquire, renew.lua  capped: which holder took or gave up which shard
                                                                       under which term; wakes standbys
    kvps:{job}:inbox                       stream  push.lua            accepted contributions that wait: rank, round,
                                                                       arrived (ms), and the text that goes into plan
                                                                       and log; in rounds of units also unit, and took
                                                                       (ms since that was handed out)
    kvps:{job}:states                      hash    push, ready,        worker -> its user's committed state, JSON behind
                                                   reject, join,       the version that made it so; before:<worker> ->
                                                   create.lua          the one before; "<worker> <round>" -> the state
                                                                       that came with a contribution that waits
    kvps:{job}:units                       hash    next_unit, push,    next: the first unit never handed out; done: how
                                                   ready, leave,       many are committed; each unit handed out and not
                                                   evict, create.lua   committed -> "w0 computes", "w0 pushed", two of
                                                                       them where it was handed out twice, or "free"
    kvps:{job}:free_units                  zset    next_unit, ready,   the units that are "free", lowest first
                                                   leave, evict.lua
    kvps:{job}:taken_units                 zset    next_unit, push,    unit -> when (ms) it was handed out to the one
                                                   leave, evict.lua    worker that computes it
                                                                       In a published job a unit is a prompt: "a0
                                                                       generates", "whole" (its items wait, or are
                                                                       taken) or "free"; here are those that an actor
                                                                       has
    kvps:{job}:rollouts                    hash    claim, take, put,   the experience of a published job: claimed (the
                                                   offer, settle,      term that takes items), number, call, took (its
                                                   ready, enter.lua    last call, of which kind, and what that took),
                                                                       batch, full (an offer had no room); bytes of all
                                                                       items, offers and offered_bytes that are out;
                                                                       form of an item; orders, entered: counters;
                                                                       trained, stale, rejected: items with that fate
    kvps:{job}:items                       hash    put, take, settle,  item "<actor>.<incarnation>:<number>" that is
                                                   ready.lua           accepted and has no fate -> the oldest version
                                                                       that it was made on, bytes, chunks, digest, and
                                                                       its prompt or -
    kvps:{job}:lots                        hash    put, take, settle,  lot (a prompt; an item, where there are none) ->
                                                   ready.lua           its place among the others, its oldest version,
                                                                       its items
    kvps:{job}:waiting_lots                zset    put, take, settle,  whole lots that wait for the learner -> place
                                                   claim.lua
    kvps:{job}:taken_lots                  zset    take, settle,       lots that the learner has taken -> place
                                                   claim, ready.lua
    kvps:{job}:lot_bases                   zset    put, take, settle,  lots that are not taken -> oldest version
                                                   claim.lua
    kvps:{job}:actors                      hash    enter, prompt,      actor -> JSON: incarnation, offered and last (its
                                                   offer, put,         highest numbers that had room, and were
                                                   quit, take.lua      accepted), offered_bytes, unit (its prompt),
                                                                       items, version, host, pid
    kvps:{job}:actor_beats                 zset    enter, offer,       actor -> server time of its last sign of life,
                                                   put, take.lua       ms; "" -> of the learner's last look
    kvps:{job}:bases                       hash    claim, ready.lua    version -> staged name of shard 0, of the last
                                                                       ones: items name what they were made on
    kvps:{job}:news                        stream  put, settle.lua     capped: a lot that has become whole; wakes the
                                                                       learner
    kvps:{job}:plan                        hash    plan, reject,       the one open plan: id, version, head, history,
                                                   publish,            nonce (of the learner's call that opened it),
                                                   recover.lua         through (the last inbox id it takes), ids (all
                                                                       of them, in a version of units), term and lots
                                                                       (of the learner that publishes, and what it has
                                                                       trained on), and text, the JSON that is logged
    kvps:{job}:square_sums                 hash    norm.lua            mark: the plan's history and id; shard -> sums of
                                                                       squares of its part of the plan's gradient and
                                                                       contributions, if several aggregators measure
                                                                       them
    kvps:{job}:norms                       stream  norm.lua            capped: the plan whose sums are all there; wakes
                                                                       the aggregators that wait for them
    kvps:{job}:ready                       hash    ready.lua           shard -> term and digest that are staged for it
    kvps:{job}:commits                     stream  ready, join, leave, the commit log: commits, joins and so on; wakes
                                                   evict, control.lua  aggregators and watchers
    kvps:{job}:evaluation                  hash    report.lua          the newest: version, figures, by, at_ms, nonce
    kvps:{job}:evaluations                 stream  report.lua          capped: all of them; it wakes nobody
    kvps:{job}:copies                      string  kvps up, run,       how many workers the command that launched the
                                                   scale               job keeps, if that may change; expires
    kvps:{job}:host:<number>               string  kvps run            JSON: the process that has this part of a run of
                                                                       several hosts, its line, and the run; expires
    kvps:{job}:last                        string  kvps run            nothing: the run of this job makes no other one,
                                                                       because its rank 0 has ended; deleted when the
                                                                       run is resumed
    kvps:{job}:pin                         string  pin.lua             JSON: the version of a slow reader; expires
    kvps:{job}:mirror                      string  mirror.lua          JSON, over shared memory: the newest version
                                                                       that Redis was given, with the job's state then
    kvps:{job}:sync                        string  sync.lua            nothing: a write that a replica must have
    kvps:{job}:never:<nonce>               -       nobody              nothing, ever: see script_header. No process
                                                                       knows the name of another, to write there
    kvps:{job}:removed                     string  remove, forget.lua  the id of a removed job, while its bytes are
                                                                       being unlinked
    kvps:{job}:trace:<worker>              stream  push, leave.lua     capped: the times of each iteration, its loss
    kvps:{job}:trace:all:losses            hash    push, leave.lua     of the whole run, thinned: version that is to
                                                                       be made -> how many losses workers said of the
                                                                       weights before it, their sum, the lowest and
                                                                       the highest
    kvps:{job}:versions                    hash    trace.lua           of the whole run, thinned: version -> how many
                                                                       shards told of it, bytes received and stored,
                                                                       sum of squares of the gradient, when it was
                                                                       made (us), its contributions, those before it,
                                                                       sum and highest of their staleness, learning
                                                                       rate
    kvps:{job}:trace:shard:<shard>         stream  trace.lua           capped: the times of each version of a shard
    kvps:{job/id/shard/}:owner              string  own.lua             the term that may delete in this slot
    kvps:{job/id/shard/}:w:<name>:<chunk>   string  aggregator          weights, raw little-endian
    kvps:{job/id/shard/}:p:<name>:<chunk>   string  aggregator          weights as workers pull them, in a lossy
                                                                   format; or the difference to their view
    kvps:{job/id/shard/}:opt.<slot>:<name>:<chunk>  string  aggregator  optimizer state; in some versions the
                                                                   view of workers, as slot view
    kvps:{job/id/shard/}:s:<name>:<chunk>   string  learner             the state that it keeps with a version
    kvps:{job/id/shard/}:m:<name>           string  aggregator          JSON manifest, staged last
    kvps:{job/id/shard/}:never              -       nobody              nothing, ever
    kvps:{job/id/shard/}:reserve:<part>     string  aggregator          zeros, as large as a version: deleted when a
                                                                       full server refuses to stage one
    kvps:{job/id/shard/}:g:<worker>.<incarnation>:<seq>:<chunk>  string  session  a gradient
    kvps:{job/id/shard/}:x:<item>:<chunk>  string  actor               an item of experience (`kvps.arrays.items`)
    kvps:{job/id/shard/}:r:<worker>.<incarnation>:<seq>:<chunk>  string  session  the residual of a worker that left,
                                                                       up to that sequence number; float32. Behind it,
                                                                       in shard 0, the state of its inner optimizer

The id of a job is a nonce, and part of the name of all its bytes: a process that unlinks the bytes of a removed job
touches nothing of a job that was made anew under its name.

Over shared memory weights, optimizer state and gradients are segments of the same names, without the chunk's number
(`kvps.transport.shared_memory`). Redis then has, under these keys, the weights and optimizer state of the newest
version that it was given.

The queue of training tasks is in RQ's own keys (rq:*), which only `kvps_workers.queue` knows.

``<name>`` is the staged name ``<version>.<term>``. Terms and incarnations contain a nonce, so no name is ever used
twice: what a paused process writes late has a name that no other process reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kvps.arrays.layout import CHUNK_BYTES
from kvps.errors import InvalidName, shown
from kvps.parsing import JOB_ID, NAME, NAME_IN_WORDS, whole

JOBS = "kvps:jobs"
MEMORY = "kvps:memory"
_ID, _ = JOB_ID
_OF_THIS_PROCESS = secrets.token_hex(8)


def check_name(kind: str, name: str) -> str:
    """Return `name` if it can be part of a key, else raise InvalidName. `kind` ("job", "worker") is for its message."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidName(f"{kind} name {shown(name)} is not allowed: use {NAME_IN_WORDS}")
    return name


def check_new_name(kind: str, name: str) -> str:
    """Return `name` if a job or worker that is made now may have it, else raise InvalidName. Jobs of earlier releases
    may have names that begin with -, and are opened as ever."""
    if check_name(kind, name).startswith("-"):
        raise InvalidName(
            f"{kind} name {shown(name)} is not allowed: commands would take it for an option, because it begins with -"
        )
    return name


def check_id(id: str) -> str:
    """Return `id` if it can be a job's id, else raise InvalidName."""
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise InvalidName(f"job id {shown(id)} is not valid: leave it out, or take one that kvps.store.fresh_id() made")
    return id


def control_keys(jobs: str, what: str = "*") -> str:
    """Return a control key of a job; or a glob pattern of control keys, if `jobs` or `what` is one."""
    return f"kvps:{{{jobs}}}:{what}"


def bytes_keys(jobs: str, what: str = "*", id: str = "*") -> str:
    """Return a glob pattern of the keys `what` in the slots of all shards of a job, or of the jobs that `jobs` matches.

    The names of jobs hold no glob characters.
    """
    return f"kvps:{{{jobs}/{id}/*/}}:{what}"


class _Control:
    """A control key, called like its attribute. It is built once, for it is used in every round."""

    names: ClassVar[list[str]] = []

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self.names.append(name)

    def __get__(self, keys: JobKeys, owner: type) -> str:
        key = keys.__dict__[self._name] = keys._control(self._name)
        return key


@dataclass(frozen=True)
class JobKeys:
    """The keys of one job; without its `id`, only its control keys. Raises InvalidName for an invalid job name."""

    job: str
    id: str = ""

    def __post_init__(self) -> None:
        check_name("job", self.job)

    def _control(self, what: str) -> str:
        return control_keys(self.job, what)

    def _bytes(self, shard: int, what: str) -> str:
        assert self.id, "the keys of bytes hold the id of their job"
        return f"kvps:{{{self.job}/{self.id}/{shard}/}}:{what}"

    config = _Control()
    made_with = _Control()
    layout = _Control()
    version = _Control()
    clock = _Control()
    workers = _Control()
    skip = _Control()
    ranks = _Control()
    rounds = _Control()
    pushed = _Control()
    draining = _Control()
    finished = _Control()
    turns = _Control()
    free_units = _Control()
    taken_units = _Control()
    heartbeat = _Control()
    inbox = _Control()
    units = _Control()
    plan = _Control()
    ready = _Control()
    commits = _Control()
    pin = _Control()
    mirror = _Control()
    sync = _Control()
    states = _Control()
    removed = _Control()
    leases = _Control()
    norms = _Control()
    square_sums = _Control()
    activity = _Control()
    aggregators = _Control()
    copies = _Control()
    last = _Control()
    evaluation = _Control()
    evaluations = _Control()
    versions = _Control()
    rollouts = _Control()
    items = _Control()
    lots = _Control()
    waiting_lots = _Control()
    taken_lots = _Control()
    lot_bases = _Control()
    actors = _Control()
    actor_beats = _Control()
    bases = _Control()
    news = _Control()

    @cached_property
    def never(self) -> str:
        """Return a key that never exists, in the slot of the job."""
        return self._control(f"never:{_OF_THIS_PROCESS}")

    def lease(self, shard: int) -> str:
        return self._control(f"lease:{shard}")

    def term(self, shard: int) -> str:
        return self._control(f"term:{shard}")

    def wish(self, shard: int) -> str:
        return self._control(f"wish:{shard}")

    def host(self, number: int) -> str:
        """Return the place of a host in the run that trains the job. It expires."""
        return self._control(f"host:{number}")

    def trace(self, worker: str) -> str:
        return self._control(f"trace:{worker}")

    @property
    def losses(self) -> str:
        return self._control("trace:all:losses")  # a worker may write the keys below `trace`

    def shard_trace(self, shard: int) -> str:
        """Return the trace of a shard. No worker's name has a colon."""
        return self._control(f"trace:shard:{shard}")

    def all_control(self, workers: Iterable[str], shards: int) -> list[str]:
        """Return all control keys of the job with these workers, except `removed`."""
        keys = [self._control(name) for name in _Control.names if name != "removed"]
        keys += [*map(self.trace, workers), self.losses]
        for shard in range(shards):
            keys += [self.lease(shard), self.term(shard), self.wish(shard), self.shard_trace(shard)]
        return keys

    def owner(self, shard: int) -> str:
        return self._bytes(shard, "owner")

    def never_in(self, shard: int) -> str:
        """Return a key of a shard's slot that never exists."""
        return self._bytes(shard, "never")

    def weights(self, shard: int, name: str, chunk: int) -> str:
        return self._bytes(shard, f"w:{name}:{chunk}")

    def pulled(self, shard: int, name: str, chunk: int) -> str:
        return self._bytes(shard, f"p:{name}:{chunk}")

    def difference(self, shard: int, name: str, sent: memoryview) -> list[tuple[str, memoryview]]:
        """Return the keys of a lossless difference to the version of this name, with the piece that each has."""
        starts = range(0, len(sent), CHUNK_BYTES)
        return [(self.pulled(shard, name, number), sent[i : i + CHUNK_BYTES]) for number, i in enumerate(starts)]

    def kept_state(self, name: str, nbytes: int) -> list[str]:
        """Return the keys of so many bytes of the state that a learner has kept with a version."""
        return [self._bytes(0, f"s:{name}:{number}") for number in range(-(-nbytes // CHUNK_BYTES))]

    def state(self, shard: int, slot: str, name: str, chunk: int) -> str:
        return self._bytes(shard, f"opt.{slot}:{name}:{chunk}")

    def array(self, shard: int, what: str, name: str, chunk: int) -> str:
        """Return the key of a chunk of the weights ("w"), or of a slot of the optimizer."""
        return self.weights(shard, name, chunk) if what == "w" else self.state(shard, what, name, chunk)

    def segment(self, what: str, name: str) -> str:
        """Return the segment of a version's weights ("w"), or of an optimizer slot, in a job over shared memory."""
        return segment_of(self.array(0, what, name, 0))

    def manifest(self, shard: int, name: str) -> str:
        return self._bytes(shard, f"m:{name}")

    def gradient(self, shard: int, worker: str, incarnation: str, seq: int, chunk: int) -> str:
        return self._bytes(shard, f"g:{worker}.{incarnation}:{seq}:{chunk}")

    def item(self, id: str, shards: int) -> tuple[int, str]:
        """Return in which of so many shards an item of experience is, and what the keys of its chunks begin with.
        Raises CorruptData for what is no id."""
        shard = whole(id.rpartition(":")[2], "the number of an item") % shards
        return shard, self._bytes(shard, f"x:{id}:")

    def residual(self, shard: int, worker: str, incarnation: str, seq: int, chunk: int) -> str:
        return self._bytes(shard, f"r:{worker}.{incarnation}:{seq}:{chunk}")

    def reserve(self, shard: int, part: int) -> str:
        return self._bytes(shard, f"reserve:{part}")

    def slot(self, shard: int) -> str:
        """Return the prefix of all keys in a shard's slot. The third part of a key is its kind, the fourth its name."""
        return self._bytes(shard, "")

    @property
    def all_bytes(self) -> str:
        """A glob pattern of all keys in the slots of the job's shards; without an id, of all jobs that ever had this
        name."""
        return bytes_keys(self.job, "*", self.id if _ID.fullmatch(self.id) else "*")


def segment_of(key: str) -> str:
    """Return the segment of shared memory that replaces a chunk's key and the keys of all chunks beside it."""
    return key.split(":", 2)[2].rpartition(":")[0]


def staged_name(version: int, term: str) -> str:
    """Return the name under which a term stages a version."""
    return f"{version}.{term}"


def version_of(name: str) -> int:
    """Return the version that was staged under a name."""
    return int(name.partition(".")[0])


def term_of(name: str) -> str:
    """Return the term that staged a version under a name."""
    return name.partition(".")[2]


def following(name: str) -> str:
    """Return the name under which the same term stages the next version."""
    version, _, term = name.partition(".")
    return staged_name(int(version) + 1, term)


def chain(name: str, first: int) -> list[str]:
    """Return the names under which the same term staged the versions from `first` to that of `name`."""
    version, _, term = name.partition(".")
    return [staged_name(each, term) for each in range(first, int(version) + 1)]
