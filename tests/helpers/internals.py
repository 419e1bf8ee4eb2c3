"""What several tests change in a running session or aggregator, so that a change of structure is made only here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

import pytest
from kvps_aggregator import Aggregator
from kvps_aggregator.step import reduce

from kvps.actors.publisher import Publisher
from kvps.actors.sending import ActorRollouts
from kvps.connection.client import Client
from kvps.errors import ServerLost
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.protocol.scripts import JobScripts
from kvps.session.session import Session
from kvps.transport.shared_memory import Segments
from kvps.transport.shm import ShmTransport


@contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside the block. Raises AttributeError if it does not live there any more."""
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def segments_of(job: Job) -> Segments | None:
    """Return the segments of a job over shared memory; None for a job over Redis."""
    return job.access.transport.segments if isinstance(job.access.transport, ShmTransport) else None


def forget_reductions() -> None:
    """Let the next step import the user's reduction again."""
    reduce._function_of.cache_clear()


def held_by(aggregator: Aggregator) -> set[int]:
    """Return the shards that an aggregator holds."""
    return set(aggregator.held.shards)


def lose_next_answer() -> None:
    """Let the next push of any session count, but lose its answer."""
    push = JobScripts.push

    def lost(*arguments: Any, **named: Any) -> Any:
        JobScripts.push = push  # type: ignore[method-assign]
        push(*arguments, **named)
        raise ServerLost("the answer was lost")

    JobScripts.push = lost  # type: ignore[assignment, method-assign]


def fall_silent(session: Session) -> None:
    """Stop the heartbeat, as if the worker's process had been killed."""
    session._membership.stop_heartbeat()


def abandon(session: Session) -> None:
    """Let the session's `with` block end without a leave."""
    session._membership.closed = True


def die_sending(actor: ActorRollouts, nbytes: int) -> None:
    """Let an actor end as if its process had been killed while it sent an item."""
    assert actor._reserve(nbytes, retries=False)
    assert actor._heart
    actor._heart.stop()
    actor._incarnation = ""


def abandon_learner(policy: Publisher) -> None:
    """Let a learner give up its shards, and keep what it has taken."""
    policy._holder.release()
    policy._thread.shutdown()
    policy._closed = True


def grow_with_each_read(monkeypatch: pytest.MonkeyPatch, job: Job, most: int = 20) -> None:
    """Let the log of a job get one more commit before each read of anything, as if the job committed faster than it is
    read. More than so many reads are an error."""
    (_, fields), reads = LogStream(job.access).page("0-0")[-1], count()
    together, call = Client.together, Client.call

    def grow(client: Client) -> None:
        assert next(reads) < most, "it reads on and on"
        call(client, "XADD", job.access.keys.commits, "*", *chain.from_iterable(fields.items()))

    def grown_together(client: Client, *arguments: Any) -> Any:
        grow(client)
        return together(client, *arguments)

    def grown_call(client: Client, *arguments: Any) -> Any:
        grow(client)
        return call(client, *arguments)

    monkeypatch.setattr(Client, "together", grown_together)
    monkeypatch.setattr(Client, "call", grown_call)
