"""The screen on real jobs, with real worker processes and real keys: it shows what they do, and the user can act."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from helpers import plain_worker
from helpers.commands import Started
from helpers.harness import aggregating, await_version, model
from helpers.servers import running_server
from helpers.waiting import eventually
from kvps_monitor.top.app import Top
from kvps_monitor.top.dialogs import Confirmation, JobChoice
from kvps_monitor.top.tables import ShardTable, WorkerTable
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

import kvps
from kvps.history.events import EventLog
from kvps.job import Job
from kvps.store import Store

pytestmark = pytest.mark.slow  # each runs a whole screen, and most of them processes
ENOUGH_S = 60
PATIENT = {"worker_timeout_ms": 60_000}  # a stopped worker is silent for long before it is evicted
ME = {"host": "here", "pid": 1, "start": "", "space": "", "device": "cpu"}

Piloted = Callable[[Top, Pilot[None]], Coroutine[Any, Any, None]]


@contextmanager
def workers(job: Job, **seconds: float) -> Iterator[dict[str, Started]]:
    """Processes of workers, each with the seconds that it computes for in a round, and an aggregator."""
    with aggregating(job), ExitStack() as stack:
        found = {}
        for name, each in seconds.items():
            environment = {**os.environ, "KVPS_REDIS_URL": job.access.client.url}
            command = [sys.executable, plain_worker.__file__, job.name, name, "1000000", str(each)]
            found[name] = Started(command, environment)
            stack.callback(lambda process=found[name].process: (process.kill(), process.communicate()))
        await_version(job, 2)
        yield found


def drive(app: Top, drive: Piloted, size: tuple[int, int] = (120, 40)) -> None:
    """Run the app on a terminal of this size, and `drive` with it."""

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await drive(app, pilot)

    asyncio.run(run())


async def until(holds: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait for something that the screen is to show."""
    deadline = asyncio.get_running_loop().time() + ENOUGH_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, what()
        await asyncio.sleep(0.05)


def lines(table: DataTable[Any]) -> list[str]:
    return [" ".join(str(cell) for cell in table.get_row_at(n)) for n in range(table.row_count)]


def drawn(app: Top) -> list[str]:
    """What the screen shows of the job."""
    above = [str(app.query_one(f"#{name}", Static).render()) for name in ("job", "legend")]
    return [*above, *lines(app.query_one(WorkerTable)), *lines(app.query_one(ShardTable))]


def seen(app: Top) -> str:
    """What the screen shows, as text."""
    return "\n".join([str(app.query_one("#notice", Static).render()), *drawn(app)])


def row(app: Top, worker: str) -> str:
    return next((line for line in lines(app.query_one(WorkerTable)) if line.split(" ")[0] == worker), "")


async def sees(app: Top, *words: str) -> None:
    await until(lambda: all(each in seen(app) for each in words), lambda: f"{words} not in:\n{seen(app)}")


def kinds(job: Job) -> list[tuple[str, str]]:
    return [(e.kind, e.facts.get("worker", "")) for e in EventLog(job.access.client, job.access.keys).newest(0)]


def test_each_worker_has_a_row_with_its_state_and_figures(store: Store) -> None:
    job = store.create_job("j", model(), workers=3, shards=2, **PATIENT)

    async def look(app: Top, pilot: Pilot[None]) -> None:
        await sees(app, "runs  BSP", "waiting for w0", "workers 3 of 3")
        await until(lambda: "█" in row(app, "w0") and "░" in row(app, "w1"), lambda: seen(app))
        # The slowest is first. When it has just pushed, all have done as many rounds.
        await until(lambda: row(app, "w0") == lines(app.query_one(WorkerTable))[0], lambda: seen(app))
        await pilot.press("s")
        assert [line.split()[0] for line in lines(app.query_one(WorkerTable))] == ["w0", "w1", "w2"]
        holder = job.access.reader.holders()[0].split(":")
        assert all(f"{holder[0]}:{holder[1]}" in line for line in lines(app.query_one(ShardTable)))
        assert app.query_one(ShardTable).row_count == 2
        before = app._view
        assert before
        await until(lambda: bool(app._view and app._view.version > before.version), lambda: seen(app))
        await sees(app, f"version {app._view.version:,}" if app._view else "")

    with workers(job, w0=0.4, w1=0.02, w2=0.02):
        drive(Top(store, "j"), look)


def test_evict_asks_first_and_then_evicts(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, **PATIENT)

    async def look(app: Top, pilot: Pilot[None]) -> None:
        await sees(app, "w0", "w1")
        await pilot.press("s", "down", "e")
        await until(lambda: bool(app.screen.query("#question")), lambda: seen(app))
        asked = str(app.screen.query_one("#question", Static).render())
        assert f"Evict w1 (process {running['w1'].process.pid} on " in asked
        await pilot.press("n")
        await until(lambda: not isinstance(app.screen, Confirmation), lambda: seen(app))
        assert ("evict", "w1") not in kinds(job), "no is no"
        await pilot.press("e")
        await until(lambda: isinstance(app.screen, Confirmation), lambda: seen(app))
        await pilot.press("y")
        await sees(app, "w1 is evicted")
        await until(lambda: "evicted" in row(app, "w1"), lambda: seen(app))

    with workers(job, w0=0.05, w1=0.05) as running:
        drive(Top(store, "j"), look)
        assert ("evict", "w1") in kinds(job)
        assert ("evict", "w0") not in kinds(job)
        reasons = [
            e.facts["reason"] for e in EventLog(job.access.client, job.access.keys).newest(0) if e.kind == "evict"
        ]
        assert reasons == ["asked for in kvps top"]
        running["w1"].until("evicted")
        version = job.state().version
        await_version(job, version + 2)  # the other goes on alone


def test_evict_spares_an_incarnation_that_came_after_the_question(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, **PATIENT)
    job.access.scripts.join("w0", "first", "", ME)

    async def look(app: Top, pilot: Pilot[None]) -> None:
        await sees(app, "w0")
        await pilot.press("e")
        await until(lambda: isinstance(app.screen, Confirmation), lambda: seen(app))
        job.access.scripts.join("w0", "second", "*", ME)
        await pilot.press("y")
        await sees(app, "w0 is in the job again: it has joined anew")

    drive(Top(store, "j"), look)
    assert job.state().members["w0"].active


def test_pause_freezes_the_screen(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, **PATIENT)

    async def look(app: Top, pilot: Pilot[None]) -> None:
        await sees(app, "waits for workers")
        await pilot.press("p")
        await sees(app, "paused")
        frozen, looked = drawn(app), app._looked
        job.access.scripts.join("w0", "n", "", ME)
        await until(lambda: app._looked > looked + 1, lambda: "it does not look")
        assert drawn(app) == frozen
        await pilot.press("p")
        await until(lambda: row(app, "w0") != "", lambda: seen(app))
        assert "paused" not in seen(app)

    drive(Top(store, "j"), look)


def test_the_list_of_jobs_leads_to_another_job(store: Store) -> None:
    for name, staleness in (("one", 0), ("two", 3)):
        made = store.create_job(name, model(), workers=1, staleness=staleness, **PATIENT)
        made.access.scripts.join(f"{name}-worker", "n", "", ME)
    store.client.call("SADD", "kvps:jobs", "three")  # it is listed, and not there

    async def look(app: Top, pilot: Pilot[None]) -> None:
        await until(lambda: isinstance(app.screen, JobChoice), lambda: seen(app))
        await pilot.press("escape")
        await sees(app, "no job is chosen")
        await pilot.press("j")
        await until(lambda: isinstance(app.screen, JobChoice), lambda: seen(app))
        await pilot.press("down", "enter")
        await sees(app, "two  ", "SSP(3)", "two-worker")
        await pilot.press("j")
        await until(lambda: isinstance(app.screen, JobChoice), lambda: seen(app))
        await pilot.press("escape")
        await pilot.press("j")
        await until(lambda: isinstance(app.screen, JobChoice), lambda: seen(app))
        await pilot.press("enter")
        await sees(app, "one  ", "BSP", "one-worker")
        assert "two-worker" not in seen(app)

    drive(Top(store), look)


def test_a_lost_server_is_told_and_the_screen_goes_on_when_it_is_back(tmp_path: Any) -> None:
    socket = str(tmp_path / "redis.sock")
    with ExitStack() as first:
        url = first.enter_context(running_server(socket=socket))
        store = first.enter_context(kvps.connect(url))
        store.create_job("j", model(), workers=2)

        async def look(app: Top, pilot: Pilot[None]) -> None:
            await sees(app, "waits for workers  BSP")
            await asyncio.to_thread(first.close)
            await sees(app, "the server does not answer", "waits for workers  BSP")
            await pilot.press("s", "p")
            assert "paused" in seen(app), "keys are answered"
            await pilot.press("p")
            with running_server(socket=socket) as again, kvps.connect(again) as new:
                new.create_job("j", model(), workers=2, staleness=4)
                await sees(app, "waits for workers  SSP(4)")
                assert "does not answer" not in seen(app)

        drive(Top(store, "j"), look)


def many(store: Store, number: int = 1000) -> Job:
    """A job of so many workers, each with recorded rounds; no process computes."""
    job = store.create_job("many", {"x": np.zeros(8, np.float32)}, workers=number, **PATIENT)
    now_us = int(1e6 * job.access.server.seconds())
    for n in range(number):
        job.access.scripts.join(f"w{n}", "n", "", ME)
        phases = ("other_ms", 1, "wait_ms", 50 - n % 50, "fetch_ms", 2, "compute_ms", 20 + n % 50, "push_ms", 3)
        facts = ("version", 1, "clock", 1, "pulled", 1000, "pushed", 1000, "loss", 0.5)
        entry = "XADD", job.access.keys.trace(f"w{n}"), "*", *phases, *facts
        rounds = [(*entry, "round", r, "at", now_us - (9 - r) * 100_000) for r in range(1, 9)]
        job.access.client.together(rounds)
    return job


def test_a_thousand_workers_do_not_keep_the_screen_from_keys(store: Store) -> None:
    """They are counted: a look draws the rows in sight alone."""
    many(store)

    async def look(app: Top, pilot: Pilot[None]) -> None:
        table = app.query_one(WorkerTable)
        await until(lambda: table.row_count == 1000, lambda: seen(app))
        await pilot.press("s", "down", "down")
        assert table.cursor_row == 2
        assert table.chosen
        assert table.chosen.worker == "w2"
        made = sum(1 for line in lines(table) if line.strip())
        assert 10 < made < 100
        await pilot.press("ctrl+end")
        await until(lambda: "w999" in lines(table)[-1], lambda: lines(table)[-1])
        await pilot.press("p", "pageup", "pageup")
        chosen = table.chosen.worker
        assert chosen != "w999"
        # Rows that come into sight while paused are filled too.
        await until(lambda: lines(table)[table.cursor_row].startswith(chosen), lambda: seen(app))
        await pilot.press("p", "ctrl+end", "e")
        await until(lambda: bool(app.screen.query("#question")), lambda: seen(app))
        assert "Evict w999 " in str(app.screen.query_one("#question", Static).render())
        await pilot.press("n", "s")
        await until(lambda: not isinstance(app.screen, Confirmation), lambda: seen(app))
        assert table.chosen.worker == "w999", "the cursor stays on its worker in another order"

    drive(Top(store, "many"), look, (80, 24))


@pytest.mark.parametrize(("job", "key"), [("j", "q"), (None, "ctrl+c")])
def test_quit_ends_the_thread_that_looks(store: Store, job: str | None, key: str) -> None:
    store.create_job("j", model(), workers=1)

    async def look(app: Top, pilot: Pilot[None]) -> None:
        if job:
            await sees(app, "BSP")
        else:
            await until(lambda: isinstance(app.screen, JobChoice), lambda: seen(app))
        await pilot.press(key)
        await until(lambda: not app.is_running, lambda: "it goes on")

    drive(Top(store, job), look)
    assert eventually(lambda: all(thread.name != "kvps-top" for thread in threading.enumerate()))
