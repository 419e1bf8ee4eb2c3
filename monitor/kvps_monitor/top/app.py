"""The screen of `kvps top`: a job's figures, a row for each worker and each shard, GPUs, and keys."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.widgets import Footer, Static

from kvps.errors import printable
from kvps.store import Store
from kvps_monitor.top import figures, rows
from kvps_monitor.top.dialogs import Confirmation, JobChoice
from kvps_monitor.top.feed import EVERY_S, Asked, Feed, Listed, Looked, NotSeen, Said, Told
from kvps_monitor.top.gpu import Gpu, Gpus
from kvps_monitor.top.tables import ShardTable, WorkerTable
from kvps_monitor.views import JobView

_LATE_S = 3.0  # a screen that is older says so


class FromFeed(Message):
    """Something that the feed has told."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.told = told


class Top(App[None]):
    """The app. It draws what its feed tells, and hands the user's wishes to the feed."""

    TITLE = "kvps top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [  # noqa: RUF012 - Textual's own way
        Binding("j", "jobs", "Jobs"),
        Binding("e", "evict", "Evict worker"),
        Binding("p,space", "pause", "Pause"),
        Binding("s", "sort", "Slowest or rank first"),
        Binding("q,ctrl+c", "quit", "Quit"),
    ]
    CSS = """
    Screen { layout: vertical; background: $background; }
    #job, #notice, #gpus { height: auto; padding: 0; }
    #notice { color: $warning; text-style: bold; }
    #gpus { color: $text-muted; }
    #legend { height: 1; color: $text-muted; }
    WorkerTable, ShardTable { background: $background; scrollbar-size-vertical: 1; overflow-x: hidden; }
    WorkerTable { height: 1fr; min-height: 3; }
    ShardTable { height: auto; max-height: 30%; margin-top: 1; }
    .datatable--cursor, WorkerTable:focus > .datatable--cursor { background: $primary 40%; }
    JobChoice, Confirmation { align: center middle; background: $background 60%; }
    .dialog { width: 90%; max-width: 90; height: auto; max-height: 90%; border: round $primary; padding: 0 1; }
    .dialog { background: $surface; }
    .dialog Static { margin-bottom: 1; }
    .dialog OptionList { height: auto; max-height: 20; border: none; padding: 0; background: $surface; }
    """

    def __init__(self, store: Store, job: str | None = None) -> None:
        """Without a job, the user is asked for one."""
        super().__init__()
        self.paused = False
        self._feed = Feed(store, job, self._hear)
        self._chosen = job
        self._gpus = Gpus()
        self._view: JobView | None = None
        self._slowest_first = True
        self._why = ""  # the last look failed, why
        self._said = ""
        self._looked = time.monotonic()

    def compose(self) -> ComposeResult:
        """Make the parts of the screen, from above."""
        yield Static(id="job")
        yield Static(id="gpus")
        yield Static(id="notice")
        yield Static(id="legend")
        yield WorkerTable()
        yield ShardTable()
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(WorkerTable).focus()
        self._feed.start()
        if self._chosen is None:
            self._feed.list_jobs()
        self.set_interval(EVERY_S, self._tick)
        self._tick()

    def on_unmount(self) -> None:
        """End the look."""
        self._feed.stop()

    def on_resize(self, _: events.Resize) -> None:
        """Make the lines above the tables anew; tables know for themselves."""
        self._draw_lines()

    def _hear(self, told: Told) -> None:
        with suppress(RuntimeError):  # the screen has ended meanwhile
            self.post_message(FromFeed(told))

    @property
    def _is_drawn(self) -> bool:
        """Whether the parts of the screen are there: while it opens or ends, they may not be."""
        return bool(self.screen_stack) and bool(self.screen_stack[0].query("#gpus"))

    def on_from_feed(self, message: FromFeed) -> None:
        """Show what the feed has told."""
        if not self._is_drawn:
            return
        match message.told:
            case Looked(view):
                self._why, self._looked = "", time.monotonic()
                if view.job == self._chosen and not self.paused:
                    self._view = view
                    self._draw()
            case NotSeen(why):
                self._why = why
            case Listed(jobs) if self._is_free:
                self.push_screen(JobChoice(jobs), self._choose)
            case Asked(job, member) if self._is_free:
                question = f"Evict {member.worker} (process {member.pid} on {member.host}) from job {job.name}? What "
                question += "it has pushed counts. Its next call raises WorkerEvicted, and the others no longer wait."
                wanted = Confirmation(question)
                self.push_screen(wanted, lambda yes: self._feed.evict(job, member) if yes else None)
            case Said(words):
                self._said = words
        self._draw_notice()

    @property
    def _is_free(self) -> bool:
        """Whether no question is on the screen: an answer that comes late asks no second one."""
        return len(self.screen_stack) == 1

    # -- keys ---------------------------------------------------------------------------------------------------------

    def action_jobs(self) -> None:
        """Show the list of jobs."""
        self._feed.list_jobs()

    def _choose(self, name: str | None) -> None:
        if name is None:
            return
        self._chosen, self.paused, self._said = name, False, ""
        self._view, self._looked = None, time.monotonic()
        self.query_one("#job", Static).update(Text(printable(name), "bold"))
        self.query_one(WorkerTable).show([], self._slowest_first)
        self.query_one(ShardTable).show([])
        self._feed.choose(name)

    def action_evict(self) -> None:
        """Ask whether to evict the worker under the cursor."""
        self._said = ""
        if chosen := self.query_one(WorkerTable).chosen:
            self._feed.ask(chosen.worker)

    def action_pause(self) -> None:
        """Freeze the screen, or let it go on."""
        self.paused = not self.paused
        self._draw_notice()

    def action_sort(self) -> None:
        """Sort the workers by rank, or the slowest first."""
        self._slowest_first = not self._slowest_first
        if self._view:
            self._draw()

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self._view:
            self.query_one(WorkerTable).show(self._view.workers, self._slowest_first)
            self.query_one(ShardTable).show(self._view.shards)
            self._draw_lines()

    def _draw_lines(self) -> None:
        if self._view:
            slowest = figures.duration(rows.slowest_ms(self._view.workers) / 1000)
            self.query_one("#job", Static).update(Text("\n").join(rows.header(self._view, self.size.width)))
            self.query_one("#legend", Static).update(rows.legend().append(f"a whole bar is {slowest}"))

    def _tick(self) -> None:
        if not self._is_drawn:
            return
        if not self.paused:
            gpus = self._gpus.look()
            found = self.query_one("#gpus", Static)
            found.display = bool(gpus)
            found.update(Text("\n").join(map(_gpu_line, gpus)))
        self._draw_notice()

    def _draw_notice(self) -> None:
        late_s = time.monotonic() - self._looked
        words = [self._said] if self._said else []
        if self.paused:
            words.append("paused: p goes on")
        if self._chosen is None:
            words.append("no job is chosen: j shows those there are")
        elif self._why:
            words.append(f"{self._why} (looked {figures.duration(late_s)} ago)")
        elif self._chosen and late_s > _LATE_S:
            words.append(f"the last look was {figures.duration(late_s)} ago")
        found = self.query_one("#notice", Static)
        found.display = bool(words)
        found.update(Text(printable("; ".join(words))))


def _gpu_line(gpu: Gpu) -> Text:
    busy, used, memory = figures.share(gpu.busy), figures.size(gpu.used), figures.size(gpu.memory)
    return Text(printable(f"GPU {gpu.number}  {gpu.name}  {busy} busy  {used} of {memory}"))


def show(store: Store, job: str | None) -> None:
    """Show a job until the user quits. SIGTERM and SIGINT end it as a key does, so that the terminal is as before."""
    threading.Thread(target=_end_with_terminal, name="kvps-terminal", daemon=True).start()
    asyncio.run(_show(Top(store, job)))


def _end_with_terminal() -> None:
    """End the process when its terminal has vanished. Textual would read its end again and again, and wait for ever to
    write, so that no signal would reach the app."""
    terminal = select.poll()
    terminal.register(sys.stdin.fileno(), 0)  # nothing but a hang-up
    terminal.poll()
    os._exit(128 + signal.SIGHUP)


async def _show(app: Top) -> None:
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        app.exit()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    await app.run_async()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
    if received:
        raise SystemExit(128 + received[0])
