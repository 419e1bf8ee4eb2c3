"""One contribution of a worker, from the first gradient that is put to its acknowledgement.

The promise: a contribution counts once or not at all, however often it is sent. A push whose result is unknown may be
repeated with the same gradients, under the same sequence number, and with no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from kvps.arrays.digest import finite
from kvps.connection.sockets import CONNECTION_CUT
from kvps.errors import ContributionLate, NotFinite, WrongOrder
from kvps.protocol.answers import Accepted
from kvps.session.buffers import GradientBuffers
from kvps.session.delivery import Delivery, Header
from kvps.session.encoder import Encoder
from kvps.session.membership import Membership
from kvps.session.upload import Gradients, GradientUpload
from kvps.transport.access import JobAccess
from kvps.transport.shared_memory import WritableSegment


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


class Push:
    """The contribution with the sequence number `seq`, the first one that is not acknowledged."""

    def __init__(self, access: JobAccess, membership: Membership, encoder: Encoder, delivery: Delivery) -> None:
        self.state = PushState.OPEN
        self._access = access
        self._membership = membership
        self._encoder = encoder
        self._delivery = delivery
        self.seq = membership.sequence + 1
        self._tried = False  # whether bytes may have been sent under this number
        self._identity_sent: str | None = None  # of the try whose result is UNKNOWN, if it was whole
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
        return self._delivery.buffer(self.seq)

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
            digests = upload.digests if counts else None
            if before is PushState.UNKNOWN and self._identity_sent != _identity(digests, header):
                raise WrongOrder(
                    "how the push before this one ended is not known, and this is another gradient: leave, and join "
                    "again"
                )
            if buffers and withdraws:
                buffers.withdraw()
            accepted = self._delivery.deliver(self.seq, upload.chunks, digests, header)
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
            self._delivery.discard(upload.chunks)
            raise
        except NotFinite:
            self.state = before
            self.forget()
            raise
        except BaseException:
            self.state, self._upload = before, None
            if before is not PushState.UNKNOWN and (upload.begun or not counts):
                self._lose_track(_identity(upload.digests if counts else None, header))
            upload.chunks.drop()
            raise

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

    def _lose_track(self, identity: str | None) -> None:
        self.state, self._identity_sent = PushState.UNKNOWN, identity

    def _opened(self, live: bool, checks_finite: bool, buffers: GradientBuffers | None, part: str) -> GradientUpload:
        """Return the present upload, or a new one, which is not `live` if bytes were sent under its number before."""
        if not self._upload:
            live, self._tried = live and not self._tried, True
            in_place = buffers is not None and buffers.in_place
            chunks = self._delivery.open(self.seq, live, in_place, part)
            self._upload = GradientUpload(self._encoder.runs, self._encoder.residual, chunks, checks_finite, part)
        return self._upload

    @property
    def _may_check_while_sending(self) -> bool:
        """Whether gradients are checked for NaN chunk by chunk, while others have left already: only if later chunks
        overwrite those. Else the chunks of a contribution that is skipped stay on the server until a sweep."""
        return not self._encoder.lossy and (self._delivery.overwrites or self._access.config.nonfinite == "reject")

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


def _identity(digests: str | None, header: Header) -> str:
    """Return what tells a contribution from another one under the same number."""
    return f"- {header.lacks}" if digests is None else f"{header.part} {digests} {header.lacks}"
