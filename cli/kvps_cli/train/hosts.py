"""`kvps run --hosts N`: the same line on each of N hosts trains one job, as torchrun's --nnodes has it.

Each host takes a place in the run, the lowest that is free, and starts the copies whose ranks belong to it. The first
host begins the run: it chooses the job's id, or finds the job that goes on. The others take both from it, and so does
a host that comes back while another is there. A place is a key with a time to live, which its host prolongs: that of a
host that was killed is free after some seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple

from kvps.errors import InvalidSetting, JobNotFound, KvpsError, UsageError
from kvps.machine import launcher
from kvps.machine.launcher import Launcher
from kvps.parsing import JOB_ID, Fields
from kvps.protocol.keys import JobKeys
from kvps.store import Store
from kvps_cli.output import say
from kvps_cli.train.resume import await_ended

log = logging.getLogger("kvps.supervise")
_LOST = signal.SIGUSR1  # to this process, when another host has its place: Ctrl-C would stop the run for all

_KEPT_S = 6  # how long the place of a host that was killed stays taken
_SILENT_S = 2  # a host that has not prolonged its place for so long may have been killed
_PROLONG_S = 0.5
_POLL_S = 0.2


class Line(NamedTuple):
    """What must be the same on all hosts of a run."""

    workers: int
    hosts: int
    rest: str

    @classmethod
    def of(cls, workers: int, hosts: int, *rest: object) -> Line:
        """Return what is compared. Of settings and command it is a digest, for they may hold a secret."""
        return cls(workers, hosts, hashlib.sha256(repr(rest).encode()).hexdigest()[:16])

    def __str__(self) -> str:
        return f"-w {self.workers} --hosts {self.hosts}"


class _Note(NamedTuple):
    """What a place says of its host: which process it is, its line, and the run: the text by which the job knows what
    launched it, and the job's id. Both are "" before the run has begun."""

    by: str
    nonce: str
    line: Line
    launched_by: str = ""
    id: str = ""

    @classmethod
    def of(cls, text: str) -> _Note:
        """Read what a key holds. Raises CorruptData."""
        f = Fields.of_json(text, "the place of a host")
        line = Line(f.whole("workers"), f.whole("hosts"), f.word("rest"))
        if not (id := f.text("id")):
            return cls(f.text("by"), f.word("nonce"), line)
        f.matching("id", *JOB_ID)
        Launcher.of(f.text("launched_by"))
        return cls(f.text("by"), f.word("nonce"), line, f.text("launched_by"), id)

    @property
    def text(self) -> str:
        return json.dumps(self._asdict() | self.line._asdict())


class Place:
    """The part of a run that this host has: the copies of these ranks.

    launched_by  the text by which the job knows what launched it, the same on all hosts
    id           the id of the job
    number       from 0
    leads        whether this host writes what one host writes for all: the lowest that is there does
    """

    def __init__(self, launched_by: str, id: str, ranks: range, number: int = 0) -> None:
        self.launched_by, self.id, self.ranks, self.number = launched_by, id, ranks, number
        self.leads = not number


def check_hosts(line: Line, most: int, redis: str | None) -> None:
    """Raise InvalidSetting for what cannot run on several hosts."""
    workers, hosts, _ = line
    if hosts > 1 and not redis:
        raise InvalidSetting(
            "--hosts needs a server that all hosts reach, and a private one is for this host alone: give --redis URL "
            "(kvps server start --listen HOST:PORT starts one, and prints it)"
        )
    if hosts > 1 and most > workers:
        raise InvalidSetting(
            f"-w {workers}:{most} is for one host: leave --hosts out; KVPS_JOB=NAME starts one more copy on any host"
        )
    if hosts > workers:
        raise InvalidSetting(f"--hosts {hosts} and -w {workers}: each host must have a copy at least")


@contextmanager
def placed(store: Store, name: str, line: Line, most: int, begin: Callable[[str], str]) -> Iterator[Place]:
    """Yield this host's place in the run of a job, and give it up behind the block.

    If no other host is there, `begin` begins the run: it gets the text by which the job knows what launched it, and
    returns the job's id. Raises UsageError if all places are taken, or another host took this one meanwhile,
    InvalidSetting if the others have another line, and what `begin` raises.
    """
    own = launcher.this_process("kvps run", most, name)
    if line.hosts == 1:
        yield Place(own, begin(own), range(most))
        return
    # No host can see whether the run lives, which may have lost the process that began it.
    launched_by = json.dumps(Launcher.of(own)._replace(start="", space="")._asdict())
    lease = _Lease(store, name, _Note(str(Launcher.of(own)), secrets.token_hex(4), line))
    before = signal.signal(_LOST, _interrupt)
    try:
        lease.take(launched_by, begin)
        ranks = range(*(end * line.workers // line.hosts for end in (lease.number, lease.number + 1)))
        lease.place = Place(lease.note.launched_by, lease.note.id, ranks, lease.number)
        workers = [f"w{rank}" for rank in ranks]
        with suppress(JobNotFound):
            await_ended(
                store.job(name),
                lambda state: [m for m in state.members.values() if m.worker in workers],
                "other processes",
                "the host that was here",
            )
        log.info("job %s: this is host %d of %d, with %s", name, lease.number + 1, line.hosts, ", ".join(workers))
        yield lease.place
    except KeyboardInterrupt:
        if lease.lost:
            raise UsageError(f"job {name}: {lease.lost}") from None
        raise
    finally:
        signal.signal(_LOST, signal.SIG_IGN)  # it may come yet
        lease.give_up()
        signal.signal(_LOST, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Lease:
    """Holds a place while its process lives: a thread prolongs it.

    number  of the place; -1 before it has one
    note    what it says
    place   what the thread tells who leads
    lost    why the place is another's; "" if it is not
    """

    def __init__(self, store: Store, job: str, note: _Note) -> None:
        self.number, self.note, self.lost = -1, note, ""
        self.place: Place | None = None
        self._client, self._job = store.client, job
        self._keys = [JobKeys(job).host(number) for number in range(note.line.hosts)]
        self._there: dict[int, str] | None = None
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._prolong, name="kvps-host", daemon=True)

    def take(self, launched_by: str, begin: Callable[[str], str]) -> None:
        """Take the lowest free place, and begin the run if no other host has."""
        began, said = time.monotonic(), False
        while self.number < 0:
            notes = self._others()
            for note in notes.values():
                self._check(note)
            free = [number for number in range(len(self._keys)) if number not in notes]
            run = next((note for note in notes.values() if note.id), None)
            if free and (run or not notes):
                mine = self.note._replace(launched_by=run.launched_by, id=run.id) if run else self.note
                if self._client.call("SET", self._keys[free[0]], mine.text, "NX", "EX", _KEPT_S):
                    self.number, self.note = free[0], mine
                continue
            # A host may have been killed right behind its last sign, just before this one came.
            if not free and time.monotonic() - began > _SILENT_S + _PROLONG_S and not self._is_silent():
                there = ", ".join(note.by for note in notes.values())
                raise UsageError(f"job {self._job}: all its {len(self._keys)} hosts are there: {there}")
            if not said:
                what = f"until {notes[0].by} has begun the run" if free else "whether one of its hosts was killed"
                say(f"job {self._job}: waits {what}")
                said = True
            time.sleep(_POLL_S)  # a key that expires gives no sign
        self._thread.start()
        if not self.note.id:
            self.note = self.note._replace(launched_by=launched_by, id=begin(launched_by))
            self._client.call("SET", self._keys[self.number], self.note.text, "EX", _KEPT_S)

    def _check(self, note: _Note) -> None:
        if note.line != self.note.line:
            differs = str(note.line) if str(note.line) != str(self.note.line) else "another command or setting"
            raise InvalidSetting(
                f"job {self._job}: {note.by} runs it with {differs}: give the same line on each host, or this run "
                f"another name (--job NAME)"
            )

    def _others(self) -> dict[int, _Note]:
        found = enumerate(self._client.together([("GET", key) for key in self._keys]))
        return {number: _Note.of(text) for number, text in found if text}

    def _is_silent(self) -> bool:
        """Whether a host that has a place may have been killed."""
        left_ms: list[int] = self._client.together([("PTTL", key) for key in self._keys])  # TTL rounds
        return min(left_ms) < 1000 * (_KEPT_S - _SILENT_S)

    def _prolong(self) -> None:
        while not (self.lost or self._given_up.wait(_PROLONG_S)):
            with suppress(KvpsError):  # who cannot reach the server is told so by what else asks it
                self._look()
        if self.lost:
            os.kill(os.getpid(), _LOST)

    def _look(self) -> None:
        """Prolong the place, and see who else is there."""
        key = self._keys[self.number]
        self._client.together([("SET", key, self.note.text, "NX", "EX", _KEPT_S), ("EXPIRE", key, _KEPT_S)])
        notes = self._others()
        run = self.note.launched_by, self.note.id
        for number, note in notes.items():
            if number == self.number and note.nonce != self.note.nonce:
                self.lost = f"this host was silent, and {note.by} has its place now"
            elif number < self.number and note.id and (note.launched_by, note.id) != run:
                self.lost = f"this host was silent, and {note.by} has begun the run anew"
        there = {number: note.by for number, note in notes.items() if number != self.number}
        # At first who is missing: until all copies have joined, nothing is committed, and no progress says why.
        absent = "is not there yet: give the same line there" if self._there is None else "has left"
        before = set(range(len(self._keys))) - {self.number} if self._there is None else self._there.keys()
        for number in sorted(there.keys() ^ before):
            how = f"is there: {there[number]}" if number in there else absent
            log.info("job %s: host %d of %d %s", self._job, number + 1, len(self._keys), how)
        self._there = there
        if self.place:
            self.place.leads = not any(number < self.number for number in there)

    def give_up(self) -> None:
        """Free the place."""
        self._given_up.set()
        if self.number >= 0:
            self._thread.join()
        if self.number >= 0 and not self.lost:
            with suppress(KvpsError):
                if (mine := self._others().get(self.number)) and mine.nonce == self.note.nonce:
                    self._client.call("DEL", self._keys[self.number])
