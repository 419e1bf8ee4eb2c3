"""One contribution of a worker, from the first gradient that is put to its acknowledgement.

The promise: a contribution counts once or not at all, however often it is sent. A push whose result is unknown may be
repeated with the same gradients, under the same sequence number, and with no others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from kvps.arrays.digest import finite
from kvps.connection.sockets import CONNECTION_CUT
from kvps.connection.urls import redacted
from kvps.errors import ContributionLate, JobNotFound, NotFinite, ServerLost, WrongOrder, counted
from kvps.protocol.answers import Accepted, InboxFull, RunOver, ServerRestarted
from kvps.protocol.scripts import JobScripts
from kvps.session.buffers import GradientBuffers
from kvps.session.encoder import Encoder
from kvps.session.membership import Membership
from kvps.session.upload import Gradients, GradientUpload
from kvps.transport.access import JobAccess
from kvps.transport.base import Uploads
from kvps.transport.shared_memory import WritableSegment

log = logging.getLogger("kvps.session")


class PushState(Enum):
    """OPEN      gradients are being put; no earlier try has an unknown result
    SENDING   `send` is running
    UNKNOWN   a try failed, and it is not known whether it was accepted or whether its bytes still arrive
    ACCEPTED  the contribution is acknowledged
    DROPPED   it came late and does not count
    """

    OPEN = auto()
    SENDING = auto()
    UNKNOWN = auto()
    ACCEPTED = auto()
    DROPPED = auto()


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


class Push:
    """The contribution with the sequence number `seq`, the first one that is not acknowledged."""

    def __init__(self, access: JobAccess, membership: Membership, uploads: Uploads, encoder: Encoder) -> None:
        self.state = PushState.OPEN
        self._access = access
        self._membership = membership
        self._uploads = uploads
        self._encoder = encoder
        self.seq = membership.sequence + 1
        self._tried = False  # whether bytes may have been sent under this number
        self._digests: str | None = None  # of the try whose result is UNKNOWN, if it was whole
        self._upload: GradientUpload | None = None

    @property
    def begun(self) -> bool:
        """Whether gradients were added."""
        return self._upload is not None

    def has(self, number: int) -> bool:
        """Return whether the gradient of this number in the layout was put."""
        return self._upload is not None and self._upload.has(number)

    @property
    def done(self) -> bool:
        """Whether its number is used: it is acknowledged, or came late and does not count."""
        return self.seq <= self._membership.sequence

    @property
    def keys(self) -> list[str]:
        """The keys under which bytes may have been sent."""
        return self._upload.chunks.keys if self._upload else []

    @property
    def missing(self) -> int:
        """How many of the chunks that are being sent are not known to have arrived. Any thread may ask."""
        upload = self._upload if self.state is PushState.SENDING else None
        return upload.chunks.missing if upload else 0

    def buffer(self) -> WritableSegment | None:
        """Return a segment to compute the gradient into, so that it need not be copied; None if there is none, or if
        bytes in it may have been sent already."""
        if self._tried or self._encoder.lossy:
            return None
        with self._membership.memory_checked():
            return self._uploads.buffer(self.seq, self._membership.settled)

    # -- gradients ----------------------------------------------------------------------------------------------

    def add(self, gradients: Sequence[Gradients], buffers: GradientBuffers | None) -> None:
        """Add gradients, and send the chunks that are now complete. Raises NotFinite; then nothing has changed."""
        with self._encoder.home.current():
            counts = all(map(self._is_finite, gradients))
        upload = self._opened(True, False, buffers, "")
        try:
            upload.counts &= counts
            upload.add(gradients, last=False)
        except BaseException:  # a part may be sent, and the rest may arrive later
            self._upload = None
            if upload.begun:
                self._lose_track(None)
            upload.chunks.drop()
            raise

    def send(
        self, gradients: Sequence[Gradients], header: Header, buffers: GradientBuffers | None, withdraws: bool
    ) -> Accepted:
        """Add the other gradients, and have the contribution accepted. `withdraws` says to detach the memory of
        `buffers` first, because other code may still write to it.

        Raises NotFinite, and WrongOrder if an earlier try with an unknown result had other gradients; then nothing has
        changed. Raises ContributionLate; then it does not count. Raises WorkerEvicted, ServerLost, JobNotFound.
        """
        if self._upload and self._upload.part != header.part:
            raise WrongOrder("put() hands over gradients of the whole model: push() the others without part=")
        counts = self._upload is None or self._upload.counts
        checks_while_sending = self._upload is None and self._may_check_while_sending
        with self._encoder.home.current():
            for gradient in gradients:
                counts &= checks_while_sending or self._is_finite(gradient)
        upload = self._opened(counts, checks_while_sending, buffers, header.part)
        self._encoder.hold(header.lacks)
        before, self.state = self.state, PushState.SENDING
        try:
            if counts:
                upload.add(gradients)
            if not upload.finite:
                counts = all(map(self._is_finite, gradients))
            digests = self._identity(upload, counts, header)
            if before is PushState.UNKNOWN and self._digests != digests:
                raise WrongOrder(
                    "how the push before this one ended is not known, and this is another gradient: leave, and join "
                    "again"
                )
            if buffers and withdraws:
                buffers.withdraw()
            accepted = self._deliver(upload, counts, header)
            if buffers:
                buffers.close()
            if counts:
                self._encoder.keep()
            self._membership.sequence += 1  # last: an interrupt before this leaves the result unknown
            self.state, self._upload = PushState.ACCEPTED, None  # lets go of the gradients
            return accepted
        except ContributionLate:
            self._membership.dropped += 1  # first: after an interrupt here, it is not taken for accepted
            self._membership.sequence += 1  # it is used, so that nothing else is stored under these names
            self.state, self._upload = PushState.DROPPED, None
            self._access.client.unlink(upload.chunks.keys)
            upload.chunks.drop()
            raise
        except NotFinite:
            self.state = before
            self.forget()
            raise
        except BaseException:
            self.state, self._upload = before, None
            if before is not PushState.UNKNOWN and (upload.begun or not counts):
                self._lose_track(self._identity(upload, counts, header))
            upload.chunks.drop()
            raise

    @staticmethod
    def _identity(upload: GradientUpload, counts: bool, header: Header) -> str:
        """Return what tells a contribution from another one under the same number."""
        return f"{upload.part} {upload.digests} {header.lacks}" if counts else f"- {header.lacks}"

    def forget(self) -> None:
        """Drop gradients that were put and not pushed. Wait until they have arrived, so that none arrives later."""
        upload, self._upload = self._upload, None
        if upload:
            try:
                upload.chunks.end()
            except BaseException as error:
                self._lose_track(None)
                if not isinstance(error, CONNECTION_CUT):
                    raise

    def _lose_track(self, digests: str | None) -> None:
        self.state, self._digests = PushState.UNKNOWN, digests

    def _opened(self, live: bool, checks_finite: bool, buffers: GradientBuffers | None, part: str) -> GradientUpload:
        """Return the present upload, or a new one, which is not `live` if bytes were sent under its number before."""
        if not self._upload:
            live, self._tried = live and not self._tried, True
            in_place = buffers is not None and buffers.in_place
            with self._membership.memory_checked():
                chunks = self._uploads.open(self.seq, live, self._membership.settled, in_place, part)
            self._upload = GradientUpload(self._encoder.runs, self._encoder.residual, chunks, checks_finite, part)
        return self._upload

    @property
    def _may_check_while_sending(self) -> bool:
        """Whether gradients are checked for NaN chunk by chunk, while others have left already: only if later chunks
        overwrite those. Else the chunks of a contribution that is skipped stay on the server until a sweep."""
        return not self._encoder.lossy and (self._uploads.overwrites or self._access.config.nonfinite == "reject")

    def _is_finite(self, gradient: Gradients) -> bool:
        """Return whether a gradient counts. One with NaN or Inf is refused (NotFinite), or counts as zeros."""
        if finite(gradient.array):
            return True
        if self._access.config.nonfinite == "skip":
            return False
        of_run = self._access.layout.parameters[gradient.first : gradient.stop]
        start = of_run[0].start
        parameter = next(p for p in of_run if not finite(gradient.array[p.start - start : p.stop - start]))
        raise NotFinite(
            f"{'buffer' if parameter.buffer else 'gradient'} {parameter.name!r} holds NaN or Inf and was not sent: "
            f"mend it, or create the job with nonfinite='skip' to count such gradients as zeros"
        )

    # -- delivery -----------------------------------------------------------------------------------------------

    def _deliver(self, upload: GradientUpload, counts: bool, header: Header) -> Accepted:
        """Store the chunks, wait for every OK, then have them accepted. A small contribution goes in one step.

        SETs and push never share a plain pipeline: a refused SET before an accepted push would be an acknowledgement
        without bytes. In a MULTI, a refused SET refuses the push too. After a cut, the worker asks whether the push was
        accepted before it sends anything again, because a resend would recreate bytes that a commit had freed.
        """
        accept = partial(self._accept, upload, counts, header)
        scripts = self._access.scripts
        if not counts:
            upload.chunks.drop()  # chunks that were sent are dead, and will be swept
            return accept(scripts)
        cut: Exception | None = None
        try:
            if upload.chunks.end():
                call = upload.chunks.with_command
                return accept(scripts.through(call) if call else scripts)
        except CONNECTION_CUT as error:
            cut = error
        return self._resend(upload, cut) or accept(scripts)

    def _resend(self, upload: GradientUpload, cut: Exception | None) -> Accepted | None:
        """Store the chunks that are not known to have arrived, unless the contribution was already accepted.

        Continues as long as chunks arrive. `cut` is the error that ended the first try, if any. Raises ServerLost.
        """
        retries, warned = self._access.client.retries(), False
        while True:
            if accepted := self._ask():
                return accepted
            missing = upload.chunks.missing
            if cut and not warned:
                log.warning("%s; what has not arrived is sent again", self._stuck(upload, missing, cut))
                warned = True
            try:
                with self._membership.memory_checked():
                    upload.chunks.resend()
                return None
            except CONNECTION_CUT as error:
                cut = error
            if upload.chunks.missing < missing:
                retries.progress()
            if not retries.pause(lambda: "no chunk of a gradient arrives"):
                advice = self._access.client.clients_evicted() or "check the network in between"
                raise ServerLost(
                    f"{self._stuck(upload, upload.chunks.missing, cut)}; for {retries.lasted} small requests "
                    f"passed and no chunk did: {advice}, then push the same gradients again"
                )

    def _ask(self) -> Accepted | None:
        """Return its acceptance, or None. A restarted server is sent nothing before its new history begins."""
        me = self._membership
        try:
            return self._access.scripts.ask(me.worker, me.incarnation, self.seq)
        except ServerRestarted:
            raise me.server_restarted() from None

    def _stuck(self, upload: GradientUpload, missing: int, cut: Exception) -> str:
        chunks = counted(len(upload.chunks.keys), "chunk")
        return (
            f"job {self._access.keys.job}: push {self.seq} of worker {self._membership.worker!r} does not get through "
            f"to {redacted(self._access.client.url)}: {missing} of {chunks} did not arrive ({cut})"
        )

    def _accept(self, upload: GradientUpload, counts: bool, header: Header, scripts: JobScripts) -> Accepted:
        """Have the chunks accepted, which are stored already or by these `scripts`, as soon as the inbox has room."""
        me, access = self._membership, self._access
        digests = upload.digests if counts else "-"
        identity = (me.worker, me.incarnation, self.seq, header.version, header.weight if counts else 0, digests)
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
                access.client.unlink(upload.chunks.keys)  # the removal may have scanned before these arrived
                raise
            except RunOver as over:  # its bytes are swept once the worker has left
                raise me.ended(over.run) from None
            except InboxFull:
                scripts = access.scripts  # the bytes are stored now
                round_state = me.round_state()
                if me.check(round_state).pending >= access.config.max_pending:
                    access.client.wait({access.keys.turns: round_state.last_entry})
