"""docs/ten-minutes.md and docs/walkthrough.md, walked: their commands run in the order of the page, and print what the
page shows.

The page's own words say where a command runs: "In terminal 2" above a block starts it beside the others, "Press
Ctrl-C in terminal 2" interrupts it, "Send SIGTERM to the command in terminal 2" too, "Terminal 2 says" is what it has
printed since. "Save this as `name`" names the file that the next block is. All other blocks run to their end.

What cannot repeat (times, process ids, digests, nonces) may be any other of its kind; but one nonce on the page is
one nonce here, so that names hang together. Under ```text moving, where the job goes on while one looks, counts may
differ too. … stands for what is left out.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.command_lines import commands_in
from helpers.commands import KVPS
from helpers.paths import ROOT, program_on_path
from helpers.servers import private_directory
from helpers.shell import kvps_in
from helpers.waiting import eventually
from helpers.zygote import Popen

import kvps.protocol.keys
from kvps.server import private_server

PAGES = [ROOT / "docs" / name for name in ("ten-minutes.md", "walkthrough.md")]

GAPS = {r"(?<![^\n])…\n": r"(?:.*\n)*?", "…": ".*"}  # lines left out, or a part of one
NONCE = r"(?<![0-9a-f])[0-9a-f]{8}(?![0-9a-f])"
VARIES = [
    *GAPS,
    r"(?:Valkey|Redis) \d+\.\d+\.\d+",
    r"unix://\S+",
    r'"(?:host|space|start)": "[^"]*"',
    r'"pid": \d+',
    r"[\w.-]+:\d+:\d+:[0-9a-f]{6}\b",  # the holder of a lease: host, process id, start time, nonce
    r"(?<=  )[\w.-]+:\d+(?=\n)",  # a worker's process: host, process id
    r"(?<!\d)\d{13}(?:-\d+)?(?!\d)",  # server time in ms; with a number behind it an id in a stream
    *(rf"(?<![0-9a-f]){n}(?![0-9a-f])" for n in ("[0-9a-f]{40}", "[0-9a-f]{16}", "[0-9a-f]{12}")),
    NONCE,
]
COUNT = r"(?<![\w:-])\d+(?:\.\d+)?(?![\w-])"


# -- the page ---------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """What the reader does, and what the page shows then. Terminal 1 is where commands run to their end."""

    line: int
    terminal: int = 1
    commands: str = ""
    signal: int = 0
    file: str = ""
    shown: str = ""
    moving: bool = False

    @property
    def looks(self) -> bool:
        """Whether it only looks, and can be done again when the others have gone on."""
        return not re.search(r"^kvps (?!cli|status|jobs)", self.commands, re.MULTILINE)


def steps_of(page: str) -> list[Step]:
    """The steps of a page, in order."""
    steps: list[Step] = []
    fence, body, terminal, file = "", list[str](), 1, ""
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith("```") and not fence:
            fence, body = line.removeprefix("```"), []
        elif line == "```":
            text = "".join(f"{line}\n" for line in body)
            if fence == "sh":
                steps.append(Step(number, terminal, commands=text))
                terminal = 1
            elif fence == "python":
                steps.append(Step(number, file=file, shown=text))
            else:
                assert fence in ("text", "text moving"), f"line {number}: {fence!r}"
                assert not steps[-1].shown, f"line {number}: whose output is this?"
                steps[-1].shown, steps[-1].moving = text, fence.endswith("moving")
            fence = ""
        elif fence:
            body.append(line)
        elif found := re.match(r"Save this as `(\S+)`", line):
            file = found[1]
        else:
            if found := re.search(r"In terminal (\d)", line):
                terminal = int(found[1])
            if found := re.match(r"Press Ctrl-C in terminal (\d)", line):
                steps.append(Step(number, int(found[1]), signal=signal.SIGINT))
            if found := re.match(r"Send SIGTERM to the command in terminal (\d)", line):
                steps.append(Step(number, int(found[1]), signal=signal.SIGTERM))
            if found := re.search(r"Terminal (\d) says", line):
                steps.append(Step(number, int(found[1])))
    return steps


# -- what is printed against what is shown ------------------------------------------------------------------------


def normal(text: str) -> str:
    """Text with the order of hashes and of JSON's fields, and the widths of tables, taken out."""
    lines, pairs = list[str](), list[str]()
    for line in [*text.replace("\r\n", "\n").split("\n"), ""]:
        if pair := re.match(r" *\d+# (.*)", line):
            pairs.append(pair[1])
            continue
        lines += sorted(pairs)
        pairs = []
        if line.startswith("{"):
            line = json.dumps(json.loads(line), sort_keys=True)
        lines.append(re.sub(r"  +", "  ", line.rstrip()))
    return "\n".join(lines).strip("\n") + "\n"


class Page:
    """What the page shows, as patterns; remembers which nonce here is which on the page."""

    def __init__(self) -> None:
        self._nonces: set[tuple[str, str]] = set()

    def shows(self, step: Step, printed: str) -> bool:
        """Whether the page shows this output for the step."""
        kinds = [*VARIES, COUNT] if step.moving else VARIES
        varies = re.compile("|".join(f"({kind})" for kind in kinds))
        shown, pattern, at, here = normal(step.shown), "", 0, list[str]()
        for found in varies.finditer(shown):
            assert found.lastindex
            kind = kinds[found.lastindex - 1]
            pattern += re.escape(shown[at : found.start()]) + GAPS.get(kind, f"({kind})" if kind == NONCE else kind)
            here += [found[0]] if kind == NONCE else []
            at = found.end()
        match = re.fullmatch(pattern + re.escape(shown[at:]), normal(printed))
        if not match:
            return False
        pairs = self._nonces | set(zip(here, match.groups(), strict=True))
        if not len(pairs) == len({ours for ours, _ in pairs}) == len({theirs for _, theirs in pairs}):
            return False
        self._nonces = pairs
        return True


# -- the terminals ------------------------------------------------------------------------------------------------


class Terminals:
    """Terminal 1 and those beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._beside: dict[int, Popen] = {}
        self._read: dict[int, int] = {}

    def run(self, commands: str) -> tuple[int, str]:
        """Run commands to their end on a terminal, where redis-cli prints otherwise than into a file."""
        screen, its_end = pty.openpty()
        process = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", commands],
            stdin=subprocess.DEVNULL,
            stdout=its_end,
            stderr=its_end,
        )
        os.close(its_end)
        printed = b"".join(_until_closed(screen))
        os.close(screen)
        return process.wait(), printed.decode()

    def start(self, number: int, command: str) -> None:
        """Start a command in a terminal of its own."""
        self.wait(number)
        with self._file(number).open("wb") as file:
            program, *arguments = shlex.split(command)
            assert program == "kvps"
            self._beside[number] = Popen([*KVPS, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self._read[number] = 0

    def end(self, number: int, by: int) -> None:
        """Press Ctrl-C, or send SIGTERM: then the command can be resumed."""
        process = self._beside.pop(number)
        process.send_signal(by)
        assert process.wait(120) == (128 + signal.SIGINT if by == signal.SIGINT else os.EX_TEMPFAIL)

    def said(self, number: int) -> str:
        """What a terminal has printed since `heard`."""
        return self._file(number).read_text()[self._read[number] :]

    def heard(self, number: int) -> None:
        self._read[number] = len(self._file(number).read_text())

    def wait(self, number: int) -> None:
        """Wait for the command in a terminal, if one runs there, to end well."""
        if process := self._beside.pop(number, None):
            assert process.wait(120) == 0, self.said(number)

    def wait_for_all(self) -> None:
        for number in list(self._beside):
            self.wait(number)

    def close(self) -> None:
        """End what a walk that was broken off has left."""
        for process in self._beside.values():
            process.kill()
            process.wait()
        private_server.stop()

    def _file(self, number: int) -> Path:
        return self._folder / f"terminal-{number}"


def _until_closed(screen: int) -> Iterator[bytes]:
    while True:
        try:
            piece = os.read(screen, 65536)
        except OSError:  # Linux's word for the other end's having been closed
            return
        if not piece:
            return
        yield piece


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_what_happens(path: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "dumb", "COLUMNS": "160", "LINES": "50", "KVPS_SERVER_STAYS": "600"}.items():
        monkeypatch.setenv(name, value)
    text, page, terminals = path.read_text(), Page(), Terminals(tmp_path)
    if "kvps cli -3" in text:  # it prints as redis-cli does on a terminal
        program_on_path("redis-cli", "valkey-cli")
    with private_directory() as programs, kvps_in(programs):
        for folder in (Path(sys.executable).parent, programs):
            monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        try:
            for step in steps_of(text):
                walk(step, page, terminals)
            terminals.wait_for_all()
            assert private_server.running() is None
        finally:
            terminals.close()


def walk(step: Step, page: Page, terminals: Terminals) -> None:
    """Do what a step says. What other processes have yet to do is waited for."""
    code, printed = 0, ""

    def as_shown() -> bool:
        nonlocal code, printed
        code, printed = terminals.run(step.commands) if step.terminal == 1 else (0, terminals.said(step.terminal))
        return code == 0 and page.shows(step, printed)

    if step.signal:
        terminals.end(step.terminal, step.signal)
        return
    if step.file:
        Path(step.file).write_text(step.shown)
        return
    if step.terminal != 1 and step.commands:
        terminals.start(step.terminal, step.commands)
    waits = step.looks or step.terminal != 1
    assert eventually(as_shown, 120 if waits else 0), (
        f"line {step.line}\n{step.commands}-- shown:\n{step.shown}-- printed, exit {code}:\n{printed}"
    )
    if step.terminal != 1:
        terminals.heard(step.terminal)


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: path.stem)
def test_a_page_has_its_reader_install_what_its_commands_need(path: Path) -> None:
    """The walk has every extra, as developers have."""
    text, project = path.read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = set(re.findall(r"\w+", " ".join(re.findall(r"pip install '\.\[(.*?)\]'", text))))
    for requirements in [project["optional-dependencies"][extra] for extra in installed]:
        installed |= set(re.findall(r"\w+", "".join(requirements)))  # of monitor: kvps[timeline,top,dashboard,metrics]
    needed = {"torch"} if "import kvps.torch\n" in text else set()
    for command, *words in commands_in("".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))):
        if command in ("up", "create", "submit"):
            needed |= {"embedded", "demo"} if "digits" in words else {"embedded"}
        for module in (ROOT / "cli" / "kvps_cli").glob(f"*/{command}.py"):
            needed |= set(re.findall(r'\bextra\("(\w+)"', module.read_text()))
    assert needed
    assert needed <= installed


def test_the_walkthrough_shows_every_key() -> None:
    """Each row of the table in keys.py, in a name that the page has."""
    page = PAGES[-1].read_text()
    rows = re.findall(r"^    (kvps:\S+)", kvps.protocol.keys.__doc__ or "", re.MULTILINE)
    assert len(rows) >= 20
    for row in rows:
        name = re.escape(row.replace("{job", "{tour")).replace("/id/shard", r"/[^/]+/\d")
        assert re.search(re.sub("<[a-z]+>", r"[\\w.$-]+", name), page), row
