"""The rules that keep the house in order, each with a short list of exceptions that have their reason. An exception
that is no longer needed fails too, or it would allow the next one that nobody weighed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from helpers.paths import PACKAGES, ROOT, TESTS

LINES = 350
pytestmark = pytest.mark.slow  # it parses all of the source
LONG = {  # file: why it is longer
    "kvps/connection/client.py": "retries, pools and commands of one connection",
    "kvps/connection/sockets.py": "the bytes of one connection",
    "kvps/device/base.py": "the only module that knows CuPy",
    "kvps/job.py": "the public face of a job",
    "kvps/protocol/keys.py": "the one table of keys",
    "kvps/protocol/scripts.py": "a typed method for every script",
    "kvps/server/private_server.py": "one server's whole life",
    "kvps/session/session.py": "the public face of a worker",
    "kvps/store.py": "the public face of a server",
    "kvps/torch/distributed.py": "the public face of an optimizer whose steps a job takes",
    "kvps/torch/session.py": "the public face of a worker with a model",
    "kvps/transport/shared_memory.py": "one format of files, read and written here alone",
}
FUNCTION_LINES = 60
ATTRIBUTES = 16
MANY_ATTRIBUTES = {
    "ShardArrays": "two versions of a shard, and what is known of its chunks",
    "GroupSession": "what a member knows of the session that its leader has",
}
PARAMETERS = 6
LATE_IMPORTS = {  # file: why it imports inside a function
    "cli/kvps_cli/look/metrics.py": "prometheus-client is an extra",
    "cli/kvps_cli/look/dashboard.py": "Starlette and uvicorn are an extra",
    "cli/kvps_cli/train/worker.py": "RQ takes its time to load",
    "monitor/kvps_monitor/loggers/event_file.py": "TensorBoard's libraries are extras",
    "monitor/kvps_monitor/loggers/wandb_run.py": "the user installs wandb",
    "cli/kvps_cli/look/top.py": "Textual is an extra",
    "cli/kvps_cli/look/timeline.py": "perfetto and matplotlib are an extra",
    "kvps/notebook.py": "IPython is there where a notebook is",
    "cli/kvps_cli/completion.py": "a shell waits for it, and seldom needs all of it",
    "cli/kvps_cli/commands.py": "settings take their time to load, and an unknown command is rare",
    "cli/kvps_cli/__init__.py": "settings take their time to load, and an unknown option is rare",
}
ONLY = {  # library: rooms that may know it
    "cupy": ("kvps/device/",),
    "redis": (
        "kvps/connection/",
        "kvps/server/",
        "cli/kvps_cli/serve/line_client.py",
        "kvps/protocol/lua_scripts.py",
        "workers/kvps_workers/queue/",
    ),
}

WALL_CLOCK = {  # who reads this machine's date and time: why, as clocks of hosts are never compared
    "cli/kvps_cli/serve/doctor.py": "how far it is from the server's, for people",
    "kvps/history/checkpoint.py": "when a file was saved, for people",
    "kvps/transport/locked_file.py": "how old a file of this host is",
    "monitor/kvps_monitor/loggers/event_file.py": "when a file was begun: TensorBoard reads files by their names",
    "workers/kvps_workers/queue/queue.py": "when a task began, for RQ's own commands",
}


@cache
def modules() -> dict[str, ast.Module]:
    """Return the tree of each source file."""
    files = (path for room in PACKAGES for path in (ROOT / room).rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


def _classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield name, node


def test_files_and_functions_are_short() -> None:
    long = {name for name in modules() if len((ROOT / name).read_text().splitlines()) > LINES}
    assert long == set(LONG), "a file of more than 350 lines is two"
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                body = (node.end_lineno or 0) - node.body[0].lineno  # options of commands are parameters
                assert body < FUNCTION_LINES, f"{name}: {node.name}"


def test_classes_are_small() -> None:
    large = set()
    for name, node in _classes():
        attributes = {
            n.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Attribute)
            and isinstance(n.ctx, ast.Store)
            and isinstance(n.value, ast.Name)
            and n.value.id == "self"
        }
        if len(attributes) > ATTRIBUTES:
            large.add(node.name)
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                parameters = len(method.args.args) + len(method.args.kwonlyargs) - 1
                assert parameters <= PARAMETERS, f"{name}: {node.name}"
    assert large == set(MANY_ATTRIBUTES)


def test_imports_stand_on_top() -> None:
    late = {
        name
        for name, tree in modules().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert late == set(LATE_IMPORTS)


@pytest.mark.parametrize("library", ONLY)
def test_only_these_rooms_know_a_library(library: str) -> None:
    for name, tree in modules().items():
        for node in ast.walk(tree):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            knows = any(module.split(".")[0] == library for module in imported)
            assert not knows or name.startswith(ONLY[library]), f"{name} imports {library}"


def test_clocks_of_hosts_are_never_compared() -> None:
    """What lasts how long, this process's own clock says; what is older, or has expired, the server's."""
    clock = r"time\.(time|time_ns|clock_gettime)|((\w+\.)*date(time)?\.)?(now|utcnow|today)"
    asked = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and re.fullmatch(clock, ast.unparse(node.func))
    }
    assert asked == set(WALL_CLOCK)


def test_tests_stand_where_the_code_does_and_import_no_test() -> None:
    rooms = {re.sub(r"^\w+/kvps_", "", str(Path(name).parent)) for name in modules()}
    rooms = {room.removeprefix("kvps/") for room in rooms}
    rooms |= {"kvps", "lab", "chaos", "helpers", "hostile", "project", "same_bits"}
    for path in TESTS.rglob("*.py"):
        room = str(path.relative_to(TESTS).parent)
        assert room in rooms | {"."}, f"{path}: no room of the code has this name"
        found = re.search(r"^\s*(from|import) [\w.]*\btest_\w+", path.read_text(), re.MULTILINE)
        assert not found, f"{path} imports a test"


def test_a_name_is_defined_once() -> None:
    """A second function replaces the first without a word; linters say so only if the first was not used before."""
    for path in [*(ROOT / name for name in modules()), *TESTS.rglob("*.py")]:
        for block in ast.walk(ast.parse(path.read_text())):
            if isinstance(block, ast.Module | ast.ClassDef):
                names = [
                    each.name
                    for each in block.body
                    if isinstance(each, ast.FunctionDef | ast.ClassDef)
                    and not any(ast.unparse(decorator) == f"{each.name}.setter" for decorator in each.decorator_list)
                ]
                twice = {name for name in names if names.count(name) > 1}
                assert not twice, f"{path} defines {twice} more than once"
