"""A worker that is a torch.distributed process group: one member, the leader, speaks to Redis for all.

    member 0, the leader   pull from Redis -> broadcast weights ... reduce gradients -> push their mean to Redis
    members 1, 2, ...                         receive weights   ... send a gradient

So the group is one worker, and its weights and gradients cross the network once. The leader is member 0 of the group.
gloo cannot repair a group after a member has died: all calls of the others fail. They raise GroupLost here. The
survivors make a new group and take their id over, and the new leader's incarnation replaces the old one. Until then the
job waits for the id, at most for its worker_timeout_ms. It knows whether the last round of the old leader was
acknowledged: `round` tells the new group where to go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from kvps import errors
from kvps.arrays.inputs import one_number
from kvps.arrays.layout import DTYPE, Array
from kvps.errors import GroupLost, InvalidSetting, JobStopped, KvpsError, RunEnds, WorkerAlive, WrongOrder
from kvps.job import Job
from kvps.session.missing import with_zeros
from kvps.session.session import Session

Message = dict[str, Any]

_OVER = "the process group is lost: make a new one, and join again with takeover=True"
_MESSAGE_BYTES = 4096
_MOST_NAME = 80  # characters of a name that members compare: no worker's is as long
_MOST_WORDS = 900  # characters of an error's message, each of 4 bytes at most


def join_as_group(
    job: Job, group: dist.ProcessGroup, worker: str | None, device: str, takeover: bool, prefetch: bool
) -> GroupSession:
    """Become one worker together with all members of a gloo group; each of them must call this.

    Raises InvalidSetting, GroupLost, and what `Job.join` raises, in every member.
    """
    if not dist.is_available() or not dist.is_initialized() or not isinstance(group, dist.ProcessGroup):
        raise InvalidSetting(
            "group must be a process group, such as torch.distributed.group.WORLD after init_process_group('gloo')"
        )
    backends = dist.get_backend_config(group)  # as in "cpu:gloo,cuda:nccl"
    if "cpu:gloo" not in backends:
        raise InvalidSetting(
            f"group has the backends {backends}, and its arrays in host memory need gloo: make a group with "
            f"torch.distributed.new_group(backend='gloo')"
        )
    channel = _Channel(group)
    name = None if worker is None else str(worker)[:_MOST_NAME]
    channel.check_equal({"job": job.name, "id": job.id, "worker": name})
    return GroupSession(job, channel, lambda: job.join(worker, device=device, takeover=takeover, prefetch=prefetch))


class GroupSession:
    """A group's side of a job, with the methods of `Session`. Each of them is called by all members, in the same order.

    worker, rank   the id and the number of the worker that the group is
    round, clock   the last round it has done, and its contributions acknowledged so far, as in `Session`
    version        the version of the weights that the last pull returned
    stopping       whether the job was stopped or suspended, as far as the group knows
    config         the settings of the job
    """

    def __init__(self, job: Job, channel: _Channel, join: Callable[[], Session]) -> None:
        self.layout = job.layout
        self._channel = channel
        self._session: Session | None = None  # the leader's
        self._ending: RunEnds | None = None
        self._own_state: dict[str, Any] = {}
        self._weights: Array = np.zeros(job.layout.size, DTYPE)
        self._skips = job.config.skips_missing
        # Behind the gradients, how many members have one of each parameter: so one sum tells what all of them lack.
        self._sent: Array = np.zeros(job.layout.size + self._skips * len(job.layout.parameters), DTYPE)
        self._gradient, self._having = self._sent[: job.layout.size], self._sent[job.layout.size :]
        self.config = job.config

        def joined() -> Message:
            self._session = join()
            return self._here() | {"worker": self._session.worker, "rank": self._session.rank}

        answer = self._led(joined)
        self.worker: str = answer["worker"]
        self.rank: int = answer["rank"]

    def pull_flat(self) -> Array:
        """Pull as `Session.pull_flat` does; valid until the next pull."""

        def pulled() -> Message:
            np.copyto(self._weights, self._leading.pull_flat())
            return self._here()

        self._led(pulled)
        with self._or_lost():
            self._channel.broadcast(self._weights)
        return self._weights

    def next_unit(self) -> int | None:
        """Return the unit of data that the next push of the group will have used, as `Session.next_unit` does."""
        answer = self._led(lambda: self._here() | {"unit": self._leading.next_unit()})
        return None if answer["unit"] is None else int(answer["unit"])

    def push(self, grads: Mapping[str, Any], loss: Any = None) -> int:
        """Push the mean of the members' gradients; return the clock that acknowledges it.

        `grads` and `loss` are as for `Session.push`. If the gradients of one member do not fit, all members raise,
        nothing has changed, and all may push again. Raises GroupLost, and what `Session.push` raises.
        """
        losses = self._agree_on(grads, loss)
        shown = sum(losses) / len(losses) if losses else None
        buffers = self._gradient[self.layout.buffer_start :]
        own = buffers.copy()
        with self._or_lost():
            self._channel.reduce(self._sent)

        def pushed() -> Message:
            np.divide(self._gradient, np.float32(self._channel.size), out=self._gradient)
            if self.layout.buffer_kind == "rank0":  # of a group, the leader's
                np.copyto(buffers, own)
            having = dict(zip(self.layout.numbers, self._having, strict=True)) if self._skips else {}
            mean = self.layout.views(self._gradient)
            self._leading.push({name: mean[name] for name in mean if having.get(name, 1)}, shown)
            return self._here()

        return int(self._led(pushed)["clock"])

    def leave(self, finished: bool = True, state: Mapping[str, Any] | None = None) -> None:
        """Leave as `Session.leave` does; nothing to do for members that do not lead."""
        if self._session:
            self._session.leave(finished, state)

    def check_weight(self, weight: object) -> NoReturn:
        """Raise InvalidSetting."""
        raise InvalidSetting("weight is not for a group, whose members count alike: leave it out")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._session:
            self._session.__exit__(kind, error, trace)
        return isinstance(error, JobStopped) and self.ended_by(error)

    def ended_by(self, error: BaseException | None) -> bool:
        """Return whether the group has raised an error because its job was stopped or suspended."""
        return error is not None and error is self._ending

    @property
    def state(self) -> dict[str, Any]:
        """The worker's state in the leader, see `Session.state`; another member's own dict, which goes nowhere."""
        return self._session.state if self._session else self._own_state

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        if self._session:
            self._session.state = value
        self._own_state = value

    @property
    def _leading(self) -> Session:
        if self._session is None:
            raise WrongOrder(_OVER)
        return self._session

    def _here(self) -> Message:
        """Return what the leader knows and the others must."""
        session = self._leading
        known = {"round": session.round, "clock": session.clock, "version": session.version}
        return known | {"stopping": session.stopping}

    def _agree_on(self, grads: Mapping[str, Any], loss: Any) -> list[float]:
        """Lay this member's gradient into its memory; return all members' losses once all have done that."""
        message: Message = {}
        failed: KvpsError | None = None
        try:
            if self._skips:
                self._having[:] = [p.name in grads for p in self.layout.parameters]
                grads, _ = with_zeros(self.layout, grads, None, "")
            np.concatenate(self.layout.hosted(grads, "gradient"), out=self._gradient)
            message = {} if loss is None else {"loss": one_number(loss, "the loss")}
        except KvpsError as error:
            failed, message = error, _as_message(error)
        with self._or_lost():
            messages = self._channel.gather(message)
        if failed:
            raise failed
        for member, other in enumerate(messages):
            if "error" in other:
                raise _error_of(other, f"member {member} of the group: ")
        return [other["loss"] for other in messages if "loss" in other]

    def _led(self, call: Callable[[], Message]) -> Message:
        """Have the leader call Redis. Return its answer in every member, or raise its error in every member."""
        answer: Message = {}
        failed: KvpsError | RunEnds | None = None
        if self._channel.leads:
            try:
                answer = call()
            except (KvpsError, RunEnds) as error:
                failed, answer = error, _as_message(error) | (self._here() if self._session else {})
        with self._or_lost():
            answer = self._channel.tell(answer)
        if "round" in answer:  # an error may have ended the round
            self.round, self.clock, self.version = answer["round"], answer["clock"], answer["version"]
            self.stopping: bool = answer["stopping"]
        if failed is None and "error" in answer:
            failed = _error_of(answer)
        if isinstance(failed, RunEnds):
            self._ending = failed
        if failed:
            raise failed
        return answer

    @contextmanager
    def _or_lost(self) -> Iterator[None]:
        """Fall silent before GroupLost is raised: if the leader left, other workers would go on without this one."""
        try:
            yield
        except GroupLost:
            self._session = None
            raise


class _Channel:
    """Collective calls of a gloo group. Each of them raises GroupLost if a member has died."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._leader = dist.get_global_rank(group, 0)
        self.leads = dist.get_rank(group) == 0
        self.size = dist.get_world_size(group)
        self._lost = False

    def broadcast(self, flat: Array) -> None:
        """Copy the leader's array into that of each member."""
        with self._alive():
            dist.broadcast(torch.from_numpy(flat), self._leader, group=self._group)

    def reduce(self, flat: Array) -> None:
        """Add all members' arrays up in the leader's; the others' contents are undefined after it."""
        with self._alive():
            dist.reduce(torch.from_numpy(flat), self._leader, group=self._group)

    def tell(self, message: Message) -> Message:
        """Return the leader's message in every member."""
        packed = _packed(message)
        with self._alive():
            dist.broadcast(packed, self._leader, group=self._group)
        return _unpacked(packed)

    def gather(self, message: Message) -> list[Message]:
        """Return the messages of all members, in every member."""
        packed = [torch.empty(_MESSAGE_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        with self._alive():
            dist.all_gather(packed, _packed(message), group=self._group)
        return list(map(_unpacked, packed))

    def check_equal(self, message: Message) -> None:
        """Raise InvalidSetting in every member unless all say the same."""
        first, *others = self.gather(message)
        for member, other in enumerate(others, 1):
            for name, value in other.items():
                if value != first[name]:
                    raise InvalidSetting(
                        f"all members of a group join the same job under the same id: member {member} has the {name} "
                        f"{value!r}, and member 0 {first[name]!r}"
                    )

    @contextmanager
    def _alive(self) -> Iterator[None]:
        if self._lost:
            raise WrongOrder(_OVER)
        try:
            yield
        except RuntimeError as error:  # gloo's, for each way in which a member can be gone
            self._lost = True
            raise GroupLost(
                f"a member of the process group is gone ({str(error).splitlines()[0][:200]}): call "
                f"torch.distributed.destroy_process_group(), make a new group, and join again with takeover=True"
            ) from error


def _packed(message: Message) -> torch.Tensor:
    text = json.dumps(message, ensure_ascii=False).encode()
    assert len(text) <= _MESSAGE_BYTES  # else the members' tensors would differ in size
    return torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> Message:
    message: Message = json.loads(packed.numpy().tobytes())
    return message


def _as_message(error: KvpsError | RunEnds) -> Message:
    return {"error": type(error).__name__, "message": str(error)[:_MOST_WORDS]}


def _error_of(message: Message, before: str = "") -> KvpsError | RunEnds:
    """Return the error that another member raised."""
    text = before + message["message"]
    if message["error"] == WorkerAlive.__name__:
        return WorkerAlive(text, {})
    kind: type[KvpsError | RunEnds] = getattr(errors, message["error"], KvpsError)
    return kind(text)
