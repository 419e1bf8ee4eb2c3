"""How soon other systems show a live run: from the first command that is typed until the run can be seen.

Each turn has a folder, ports and a name of its own, and a browser that has cached nothing. Commands are typed without
a pause. A page that does not answer, or does not show the run in some seconds, is loaded again, as a person would.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Error, Page, sync_playwright

from kvps.errors import InvalidSetting
from kvps_bench.crew import ONE_THREAD, free_port
from kvps_bench.peer import end_session
from kvps_bench.result import NOT_INSTALLED
from kvps_bench.screen_systems import SCRIPTS, Command, System, Turn
from kvps_bench.turns import CaseFailed, Times, in_turns

Say = Callable[[str], None]
_THIS_PYTHON = Path(sys.executable).parent
_LOCAL = ("127.0.0.1", "localhost", "")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_S = 120.0
_POLL_S = 0.02
_ANSWER_S = 5.0
_SETTLED_S = 8.0  # a page's picture has what it fetches and draws by then
_GOODBYE_S = 5.0
_PICTURES = {"wide": (1280, 900), "phone": (390, 844)}
_TOKEN_ASKED = "Authentication Token Required"
_VERSIONS = "import importlib.metadata as m, sys; print(', '.join(f'{p} {m.version(p)}' for p in sys.argv[1:]))"


@dataclass
class Seen:
    """What was seen of a system beside its times. `widths` is view -> width in pixels that a phone has to scroll."""

    versions: str = ""
    commands: Sequence[str] = ()
    other_hosts: set[str] = field(default_factory=set)
    widths: dict[str, int] = field(default_factory=dict)
    why: str = ""


class Typed:
    """Commands that run in a turn's folder, each as the first process of a session; they end with the block."""

    def __init__(self, programs: Path, turn: Turn) -> None:
        self._environment = os.environ | ONE_THREAD | {"PATH": f"{programs}:{os.environ['PATH']}"}
        if programs == _THIS_PYTHON:
            self._environment |= {"KVPS_RUNTIME_DIR": str(turn.folder)}
        else:
            self._environment |= {"PYTHONPATH": str(SCRIPTS), "HOME": str(turn.folder)}  # and nothing of this Python
        self._folder, self._log = turn.folder, turn.folder / "log"
        self._processes: list[subprocess.Popen[bytes]] = []

    def type(self, command: Command) -> None:
        """Start a command, and wait until its port answers if it opens one."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command.words,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        if command.opens:
            self.until(lambda: _answers(command.opens))
        if command.prints:
            self.until(lambda: self.printed(command.prints))

    def output(self, words: Sequence[str]) -> str:
        """Return what a command prints that runs to its end, without the space around it."""
        done = subprocess.run(words, cwd=self._folder, env=self._environment, capture_output=True, text=True)
        return done.stdout.strip()

    def until(self, over: Callable[[], bool]) -> None:
        """Wait until `over`. Raises CaseFailed if that takes too long, or if a command has failed."""
        deadline = time.monotonic() + _PATIENCE_S
        while not over():
            if any(process.poll() for process in self._processes):
                raise CaseFailed(f"failed: {self._last_words()}")
            if time.monotonic() > deadline:
                raise CaseFailed(f"failed: it did not show the run in {_PATIENCE_S:g} s")
            time.sleep(_POLL_S)

    def printed(self, pattern: str) -> bool:
        """Return whether the commands have printed such a text."""
        return re.search(pattern, self._log.read_text(errors="replace")) is not None

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:200] if lines else "it ended without a word"

    def close(self) -> None:
        """Interrupt all commands as Ctrl-C does, then kill what is left of their sessions."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        deadline = time.monotonic() + _GOODBYE_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0, deadline - time.monotonic()))
            end_session(process.pid)
            process.wait()


class Screens:
    """Systems that show runs in one browser. After a system's last turn, pictures of its pages go into `pictures`."""

    def __init__(self, browser: Browser, folder: Path | None, pictures: Path | None) -> None:
        self._browser, self._folder, self._pictures = browser, folder, pictures

    def programs(self, system: System) -> Path | None:
        """Return the folder with a system's programs, or None if it is not installed."""
        if not system.environment:
            return _THIS_PYTHON
        programs = self._folder / system.environment / "bin" if self._folder else None
        return programs if programs and (programs / "python").exists() else None

    def turn(self, system: System, seen: Seen, last: bool) -> float:
        """Return the seconds of one turn. Raises CaseFailed if the run cannot be seen."""
        programs = self.programs(system)
        assert programs
        with ExitStack() as stack:
            # Processes may write until they are ended, and Ray's sockets need a short path.
            folder = tempfile.TemporaryDirectory(prefix="see-", ignore_cleanup_errors=True)
            turn = Turn(f"run-{secrets.token_hex(3)}", free_port(), free_port(), Path(stack.enter_context(folder)))
            commands = system.commands(turn)
            every = [*(command.words for command in commands), *filter(None, [system.token])]
            seen.commands = [shlex.join(words).replace(f"{SCRIPTS}/", "") for words in every]
            page = self._page(stack, seen)
            typed = Typed(programs, turn)
            stack.callback(typed.close)
            begin = time.monotonic()
            for command in commands:
                typed.type(command)
            if system.page:
                _open(page, typed, system, turn)
            else:
                typed.until(lambda: typed.printed(system.shows(turn)))
            took = time.monotonic() - begin
            if last and system.page:
                _loaded(page, turn.root)  # the front page may ask for more than the page that was measured
                page.wait_for_timeout(1000 * _SETTLED_S)
            if last and self._pictures:
                self._take(page, system, turn, seen)
            return took

    def _page(self, stack: ExitStack, seen: Seen) -> Page:
        context = stack.enter_context(self._browser.new_context())
        page = context.new_page()
        hosts = seen.other_hosts
        page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname or ""))
        return page

    def _take(self, page: Page, system: System, turn: Turn, seen: Seen) -> None:
        assert self._pictures
        self._pictures.mkdir(parents=True, exist_ok=True)
        for view, path in system.views.items():
            for size, (width, height) in _PICTURES.items():
                page.set_viewport_size({"width": width, "height": height})
                page.goto("about:blank")  # a new fragment alone would not load the page again
                page.goto(turn.root + path.format(name=turn.name), wait_until="commit")
                page.wait_for_timeout(1000 * _SETTLED_S)
                page.screenshot(path=self._pictures / f"{system.name.replace(' ', '-')}-{view}-{size}.png")
                if size == "phone":
                    seen.widths[view] = int(page.evaluate("document.documentElement.scrollWidth"))


def measure(
    folder: Path | None, wanted: Sequence[System], turns: int, pictures: Path | None, say: Say
) -> dict[str, Any]:
    """Measure these systems in turns; return their rows, with the seconds of each turn.

    `folder` holds their environments. Pictures of their pages are taken if `pictures` says into which folder.

    Raises InvalidSetting if this machine has no browser.
    """
    systems, before = {system.name: system for system in wanted}, os.getloadavg()[0]
    found = {name: Seen() for name in systems}
    with _browser() as browser:
        screens = Screens(browser, folder, pictures)
        for name, system in systems.items():
            if programs := screens.programs(system):
                found[name].versions = _versions(programs, system)
            else:
                found[name].why = NOT_INSTALLED
        left = dict.fromkeys(systems, turns)

        def case(name: str) -> list[float]:
            left[name] -= 1
            say(f"{name}: turn {turns - left[name]} of {turns}")
            try:
                return [screens.turn(systems[name], found[name], last=not left[name])]
            except (CaseFailed, Error) as error:
                found[name].why = str(error).splitlines()[0]
                raise CaseFailed(found[name].why) from error

        cases = {name: partial(case, name) for name in systems if not found[name].why}
        times = in_turns(cases, turns, warm_up=False)
        return {
            "bench": "screens",
            "turns": turns,
            "machine": {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "browser": browser.version},
            "load_1m": [round(load, 2) for load in (before, os.getloadavg()[0])],  # others may use the machine too
            "rows": [_row(name, found[name], times.get(name)) for name in systems],
        }


def _row(name: str, seen: Seen, times: Times | None) -> dict[str, Any]:
    hosts = sorted(seen.other_hosts.difference(_LOCAL))
    row: dict[str, Any] = {"system": name, "versions": seen.versions, "commands": list(seen.commands)}
    if times is None:
        return {**row, "not_measured": seen.why}
    seconds = [round(second, 2) for second in times.seconds]
    return {**row, "seconds": seconds, "other_hosts": hosts, "phone_widths": seen.widths}


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of what `measure` returned."""
    cells = []
    for row in found["rows"]:
        took = sorted(row.get("seconds", ()))
        shown = f"{Times((tuple(took),)).median:.1f} ({took[0]:.1f} to {took[-1]:.1f})" if took else row["not_measured"]
        hosts = ", ".join(row.get("other_hosts", ())) or ("none" if took else "-")
        cells.append([row["system"], row["versions"], str(len(row["commands"]) or "-"), shown, hosts])
    return ["system", "versions", "commands", "s, median (least to most)", "other hosts asked"], cells


def _open(page: Page, typed: Typed, system: System, turn: Turn) -> None:
    """Open the system's page until it shows the run. Raises CaseFailed if it never does."""
    url, run = f"{turn.root}{system.page}", system.shows(turn)
    if system.token:
        typed.until(lambda: _loaded(page, url) and _shows(page, _TOKEN_ASKED, system.reload_s))
        page.get_by_role("dialog").get_by_role("textbox").fill(typed.output(system.token))
        page.keyboard.press("Enter")
        page.get_by_role("dialog").wait_for(state="hidden")
        if _shows(page, run, system.reload_s):
            return
    typed.until(lambda: _loaded(page, url) and _shows(page, run, system.reload_s))


def _loaded(page: Page, url: str) -> bool:
    """Load a page; return False if nobody answers."""
    with suppress(Error):
        page.goto("about:blank")  # for a page that is open already would not be loaded again
        page.goto(url, wait_until="commit", timeout=1000 * _ANSWER_S)
        return True
    return False


def _shows(page: Page, pattern: str, for_s: float) -> bool:
    """Return whether the page shows this text in so many seconds."""
    with suppress(Error):
        page.get_by_text(re.compile(pattern)).filter(visible=True).first.wait_for(timeout=1000 * for_s)
        return True
    return False


@contextmanager
def _browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if not program:
        raise InvalidSetting("screens opens pages in Chromium: install it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _versions(programs: Path, system: System) -> str:
    command = [str(programs / "python"), "-c", _VERSIONS, *system.packages]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
