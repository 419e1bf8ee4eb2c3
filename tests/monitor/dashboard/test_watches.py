"""One watch of a job for all its viewers: it is shared, ends with them, and goes on after what is lost comes back."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from helpers.harness import aggregating, gradient, model
from helpers.servers import private_directory, running_server
from helpers.waiting import eventually
from kvps_monitor.dashboard import watches as watches_module
from kvps_monitor.dashboard.watches import TooManyWatches, Watches
from kvps_monitor.spans import losses_of

import kvps
from kvps.errors import JobNotFound
from kvps.store import Store


def looking() -> list[str]:
    """The names of the threads that look at jobs."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvps-look-")]


async def taken(frames: AsyncIterator[bytes]) -> dict[str, Any]:
    """Return the next frame."""
    text = (await asyncio.wait_for(anext(frames), 60)).decode()
    found: dict[str, Any] = json.loads(text.removeprefix("data: "))
    return found


async def until(frames: AsyncIterator[bytes], **wanted: Any) -> dict[str, Any]:
    """Return the next frame that has these values."""
    while True:
        frame = await taken(frames)
        if wanted.items() <= frame.items():
            return frame


@pytest.mark.slow
def test_viewers_share_a_watch_and_the_last_one_ends_it(store: Store) -> None:
    for name in ("a", "b"):
        store.create_job(name, model())

    async def scene() -> None:
        watches = Watches(store)
        one, two, other = [await watches.frames(job) for job in ("a", "a", "b")]
        for frames in (one, two, other):
            assert (await taken(frames))["full"]
        assert watches.count() == {"a": 2, "b": 1}
        assert sorted(looking()) == ["kvps-look-a", "kvps-look-b"]
        await one.aclose()
        assert (await taken(two))["n"] > 1
        assert watches.count() == {"a": 1, "b": 1}
        last = (await taken(two))["n"]
        await two.aclose()
        assert watches.count() == {"a": 0, "b": 1}
        again = await watches.frames("a")
        frame = await taken(again)
        assert frame["full"]
        assert frame["n"] >= last, "a viewer that comes back soon finds the same watch"
        await again.aclose()
        while "kvps-look-a" in looking():  # it lingers for a page that is loaded again
            await taken(other)
        assert watches.count() == {"b": 1}
        watches.close()

    asyncio.run(scene())
    assert eventually(lambda: not looking())


@pytest.mark.slow
def test_a_slow_viewer_is_sent_fewer_frames_and_lacks_nothing(store: Store) -> None:
    job = store.create_job("a", model(), workers=2)

    async def scene() -> None:
        watches = Watches(store)
        slow, fast = await watches.frames("a"), await watches.frames("a")
        first = await taken(slow)
        await taken(fast)
        await asyncio.to_thread(job.access.scripts.join, "w0", "n", "", {"host": "h", "pid": 1, "device": "cpu"})
        # The slow one takes nothing while the other takes several.
        numbers = [(await taken(fast))["n"] for _ in range(5)]
        frame = await taken(slow)
        assert frame["n"] >= numbers[-1] > first["n"] + 3
        assert [row[0] for row in frame["workers"]] == ["w0"], "what frames that were passed over had"
        assert [event["event"] for event in frame["events"]] == ["join"]
        watches.close()

    asyncio.run(scene())


def test_a_name_starts_no_thread_and_only_so_many_jobs_are_looked_at(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches_module, "MOST_WATCHES", 2)
    for name in ("a", "b", "c"):
        store.create_job(name, model())

    async def scene() -> None:
        watches = Watches(store)
        for number in range(20):
            with pytest.raises(JobNotFound, match=f"no job 'none-{number}'"):
                await watches.frames(f"none-{number}")
        assert looking() == [], "no job has such a name"
        one, other = await watches.frames("a"), await watches.frames("b")
        for frames in (one, other):
            await taken(frames)
        with pytest.raises(TooManyWatches, match="2 jobs are looked at"):
            await watches.frames("c")
        assert (await taken(await watches.frames("a")))["full"], "another viewer of a job that is looked at"
        await other.aclose()
        third = await watches.frames("c")
        assert (await taken(third))["full"], "in the place of a job that only lingered"
        assert sorted(watches.count()) == ["a", "c"]
        watches.close()

    asyncio.run(scene())
    assert eventually(lambda: not looking())


def test_the_chart_of_the_loss_is_of_the_whole_run(store: Store) -> None:
    """The traces have the last thousand rounds of a worker; of those before, every fourth version is kept."""
    job = store.create_job("a", model(), workers=1)
    job.access.scripts.join("w0", "n", "", {"host": "h", "pid": 1, "device": "cpu"})
    traces = [f"round {n} version {n - 1} loss {1 / n:.6g}" for n in range(1, 2501)]
    job.access.scripts.push("w0", "1-n", 1, 0, 1, "-", job.state().history, traces=traces)
    losses = losses_of(job)
    assert [version for version, *_ in losses] == list(range(4, 2501, 4))
    assert losses[1] == (8, 0.125, 0.125, 0.125)

    async def scene() -> None:
        watches = Watches(store)
        points = (await taken(await watches.frames("a")))["series"]["loss"]["points"]
        assert points[0] == [4, 0.25, 0.25, 0.25]
        assert points[-1][0] == 2500
        watches.close()

    asyncio.run(scene())
    job.access.client.call("HSET", job.access.keys.losses, "4", "a b c d")
    with pytest.raises(kvps.CorruptData, match="losses of version '4'"):
        losses_of(job)


def test_charts_of_a_finished_job_are_of_the_time_in_which_it_ran(store: Store) -> None:
    """They had one point, of the look, where nothing moves any more."""
    job = store.create_job("a", model(), workers=1)
    with aggregating(job):
        with job.join("w0") as session:
            for number in range(4):
                session.push(gradient(session.pull(), 0, number), loss=1.0)
                time.sleep(0.15)
        job.await_finished()

    async def scene() -> None:
        watches = Watches(store)
        frame = await taken(await watches.frames("a"))
        for name in ("made", "rate", "traffic", "staleness", "norm", "lr"):
            assert [x for x, *_ in frame["series"][name]["points"]][-3:] == [2, 3, 4], name
        versions = [row[1] for row in frame["series"]["rate"]["points"]]
        assert max(versions) > 0
        watches.close()

    asyncio.run(scene())


def test_a_job_that_cannot_be_read(store: Store, raw: Any) -> None:
    job = store.create_job("a", model())

    async def scene() -> None:
        watches = Watches(store)
        frames = await watches.frames("a")
        await taken(frames)
        raw.hset(job.access.keys.version, "version", "<script>")
        assert "<script>" in (await until(frames, trouble="unreadable"))["message"]
        raw.hset(job.access.keys.version, "version", "0")
        assert await until(frames, full=True)
        watches.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_a_server_that_is_lost_and_comes_back() -> None:
    with private_directory() as folder:
        path = str(Path(folder) / "server")
        asyncio.run(_lose_the_server(path))
    assert eventually(lambda: not looking())


async def _lose_the_server(path: str) -> None:
    server = running_server(socket=path)
    url = server.__enter__()
    with kvps.connect(url) as store:
        store.create_job("a", model())
        watches = Watches(Store(store.client.twin(1.0)))
        frames = await watches.frames("a")
        await taken(frames)
        await asyncio.to_thread(server.__exit__, None, None, None)
        await until(frames, trouble="lost")
        assert watches.newest("a") is None
        with running_server(socket=path):
            assert await until(frames, trouble="gone"), "the server is new and has no job"
            await asyncio.to_thread(store.create_job, "a", model())
            assert await until(frames, full=True)
            watches.close()
        while looking():
            time.sleep(0.02)
