"""Brings one contribution to the server and has it accepted: every byte is stored before the acknowledgement.

What is delivered, and under which number, `kvps.session.push` decides. Nothing here changes a session's count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from kvps.connection.sockets import CONNECTION_CUT
from kvps.connection.urls import redacted
from kvps.errors import JobNotFound, ServerLost, WrongOrder, counted
from kvps.protocol.answers import Accepted, InboxFull, RunOver, ServerRestarted
from kvps.protocol.scripts import JobScripts
from kvps.session.membership import Membership
from kvps.transport.base import ChunkUpload
from kvps.transport.opening import OpenedJob
from kvps.transport.shared_memory import WritableSegment

log = logging.getLogger("kvps.session")


class Header(NamedTuple):
    """The data that is accepted together with a contribution's bytes.

    version  the version of the weights that it was computed on, in this `history`
    unit     the unit of data that it has used, if the job hands out units
    traces   the traces of earlier iterations of the worker, which travel with this push
    weight   how much it weighs in a weighted reduction, else 1
    part     the part of the model that it is of, "" for all of it
    lacks    the parameters without a gradient, see `number_ranges`; zeros are sent for them
    state    what the user of the worker keeps, as JSON; "" if it has not changed
    """

    version: int
    history: str
    unit: int | None
    traces: list[str]
    weight: int
    part: str = ""
    lacks: str = ""
    state: str = ""


class Delivery:
    """The way of one incarnation's contributions to the server, in chunks of `sizes` bytes.

    overwrites  whether the next contribution overwrites bytes that were sent and do not count; else they stay behind
    """

    def __init__(self, access: OpenedJob, membership: Membership, sizes: Iterable[int]) -> None:
        self._access = access
        self._membership = membership
        self._uploads = access.transport.uploads(membership.worker, membership.incarnation, sizes)
        self.overwrites = self._uploads.overwrites

    def buffer(self, seq: int) -> WritableSegment | None:
        """Return a segment to compute a gradient into, so that it need not be copied; None if there is none. Raises
        ServerFull, WorkerEvicted."""
        with self._membership.memory_checked():
            return self._uploads.buffer(seq, self._membership.settled)

    def open(self, seq: int, live: bool, in_place: bool, part: str) -> ChunkUpload:
        """Return the upload of one contribution; see `kvps.transport.base.Uploads.open`. Raises ServerFull,
        WorkerEvicted."""
        with self._membership.memory_checked():
            return self._uploads.open(seq, live, self._membership.settled, in_place, part)

    def release(self) -> None:
        """Give up the bytes of contributions that wait no more."""
        self._uploads.release(self._membership.settled)

    def discard(self, chunks: ChunkUpload) -> None:
        """Delete what was stored of a contribution that does not count."""
        self._access.client.unlink(chunks.keys)
        chunks.drop()

    def deliver(self, seq: int, chunks: ChunkUpload, digests: str | None, header: Header) -> Accepted:
        """Store the chunks, wait for every OK, then have them accepted. A small contribution goes in one step.

        `digests` is what the shards' parts of it must have; None has a contribution of zeros accepted, without bytes.
        Raises ContributionLate, UnitDone, WorkerEvicted, RunEnds, ServerLost, JobNotFound.

        SETs and push never share a plain pipeline: a refused SET before an accepted push would be an acknowledgement
        without bytes. In a MULTI, a refused SET refuses the push too. After a cut, the worker asks whether the push was
        accepted before it sends anything again, because a resend would recreate bytes that a commit had freed.
        """
        accept = partial(self._accept, seq, chunks.keys, digests, header)
        scripts = self._access.scripts
        if digests is None:
            chunks.drop()  # chunks that were sent are dead, and will be swept
            return accept(scripts)
        cut: Exception | None = None
        try:
            if chunks.end():
                if chunks.held:
                    store_first = partial(self._access.client.put_and_call, chunks.held, cuts=False)
                    scripts = scripts.through(store_first)
                return accept(scripts)
        except CONNECTION_CUT as error:
            cut = error
        return self._resend(seq, chunks, cut) or accept(self._access.scripts)

    def _resend(self, seq: int, chunks: ChunkUpload, cut: Exception | None) -> Accepted | None:
        """Store the chunks that are not known to have arrived, unless the contribution was already accepted.

        Continues as long as chunks arrive. `cut` is the error that ended the first try, if any. Raises ServerLost.
        """
        retries, warned = self._access.client.retries(), False
        while True:
            if accepted := self._ask(seq):
                return accepted
            missing = chunks.missing
            if cut and not warned:
                log.warning("%s; what has not arrived is sent again", self._stuck(seq, chunks, missing, cut))
                warned = True
            try:
                with self._membership.memory_checked():
                    chunks.resend()
                return None
            except CONNECTION_CUT as error:
                cut = error
            if chunks.missing < missing:
                retries.progress()
            if not retries.pause(lambda: "no chunk of a gradient arrives"):
                advice = self._access.client.clients_evicted() or "check the network in between"
                raise ServerLost(
                    f"{self._stuck(seq, chunks, chunks.missing, cut)}; for {retries.lasted} small requests passed and "
                    f"no chunk did: {advice}, then push the same gradients again"
                )

    def _ask(self, seq: int) -> Accepted | None:
        """Return its acceptance, or None. A restarted server is sent nothing before its new history begins."""
        me = self._membership
        try:
            return self._access.scripts.ask(me.worker, me.incarnation, seq)
        except ServerRestarted:
            raise me.server_restarted() from None

    def _stuck(self, seq: int, chunks: ChunkUpload, missing: int, cut: Exception) -> str:
        return (
            f"job {self._access.keys.job}: push {seq} of worker {self._membership.worker!r} does not get through to "
            f"{redacted(self._access.client.url)}: {missing} of {counted(len(chunks.keys), 'chunk')} did not arrive "
            f"({cut})"
        )

    def _accept(self, seq: int, keys: list[str], digests: str | None, header: Header, scripts: JobScripts) -> Accepted:
        """Have the chunks accepted, which are stored already or by these `scripts`, as soon as the inbox has room."""
        me, access = self._membership, self._access
        weight, digest = (0, "-") if digests is None else (header.weight, digests)
        identity = (me.worker, me.incarnation, seq, header.version, weight, digest)
        while True:
            try:
                return scripts.push(
                    *(*identity, header.history, header.unit, header.traces),
                    part=header.part,
                    lacks=header.lacks,
                    state=header.state,
                )
            except (ServerRestarted, WrongOrder):  # this session does not miscount: the server forgot some
                raise me.server_restarted() from None
            except JobNotFound:
                access.client.unlink(keys)  # the removal may have scanned before these arrived
                raise
            except RunOver as over:  # its bytes are swept once the worker has left
                raise me.ended(over.run) from None
            except InboxFull:
                scripts = access.scripts  # the bytes are stored now
                round_state = me.round_state()
                if me.check(round_state).pending >= access.config.max_pending:
                    access.client.wait({access.keys.turns: round_state.last_entry})
