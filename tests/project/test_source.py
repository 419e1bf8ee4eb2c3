"""A search of the source for what would make data into code, or into a path that it chose.

The rules look at the syntax, with names resolved through the imports of a module. They find what is written by mistake
or out of habit. They do not find what hides, as in getattr(builtins, "ev" + "al").
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from helpers.paths import PACKAGES, ROOT

NEVER = {  # modules and functions that no source names: why
    "it runs what it reads": "pickle _pickle dill cloudpickle joblib marshal shelve dbm yaml",
    "it unpickles, if it is told to": "numpy.load numpy.lib.format torch.load",
    "text is no code": "eval exec compile code codeop runpy importlib.util.spec_from_file_location",
    "the source says which module it means": "__import__ pkgutil.resolve_name",
    "a shell reads the command": "os.system os.popen subprocess.getoutput subprocess.getstatusoutput",
    "somebody else may make the file first": "tempfile.mktemp",
    "a short text may become a long one": "xml",
    "the names inside choose where files go": "tarfile zipfile shutil.unpack_archive",
}
_NEVER = tuple(f"{each}." for names in NEVER.values() for each in names.split())
NEVER_SAID = {"shell": False, "allow_pickle": False, "weights_only": True}  # argument: the only value that it may have
IMPORTS = {  # where a module is imported whose name is not in the source: why
    "kvps/__init__.py: __getattr__": "a module of kvps, from a table in the source",
    "cli/kvps_cli/commands.py: _command": "a module of a command, from a table in the source",
    "workers/kvps_workers/task.py: load_task": "a built-in task, from a list in the source",
    "kvps/optim/user_code.py: _import_from_here": "the user's module in the current directory, see docs/security.md",
}
STARTS = {  # who starts processes: what
    "cli/kvps_cli/serve/host.py": "this Python, as an aggregator",
    "cli/kvps_cli/prove/fault_injection.py": "this Python, on kvps's own modules",
    "cli/kvps_cli/serve/server.py": "redis-cli or valkey-cli of this machine",
    "cli/kvps_cli/train/further.py": "the command behind `kvps run --`, to hear what it asks for",
    "cli/kvps_cli/supervise.py": "this Python, or the command behind `kvps run --`",
    "cli/kvps_cli/prove/verify.py": "the same command again, with one thread",
    "kvps/connection/stand_in.py": "this Python, on the program of the stand-in",
    "kvps/machine/child_process.py": "the command of whoever calls",
    "kvps/machine/process.py": "the command of whoever calls",
    "kvps/server/server_process.py": "the server program of this machine, or this Python on the watchdog",
    "kvps/server/watchdog.py": "the server program of this machine",
    "workers/kvps_workers/helper_processes.py": "this Python, on the module of the helper process",
    "workers/kvps_workers/queue/task_runner.py": "this Python, on the module of the task process",
}
LOADS = {  # who calls C: what
    "kvps/machine/process.py": "prctl of the C library",
    "kvps/server/watchdog.py": "prctl of the C library",
    "kvps/transport/shared_memory.py": "mmap of the C library",
}
WRITES = {  # who makes files or directories: which
    "aggregator/kvps_aggregator/verify/recording.py": "what --record asks for",
    "cli/kvps_cli/output.py": "the picture, trace or page that --out names",
    "cli/kvps_cli/train/up.py": "the file of --report",
    "kvps/launch.py": "what a script asks for, where kvps run has said",
    "kvps/history/checkpoint_directory.py": "the note that a run has ended, beside its checkpoints",
    "kvps/history/tensor_file.py": "checkpoints and best versions in the directory that an option names",
    "kvps/history/log_file.py": "logs beside the checkpoints",
    "kvps/machine/files.py": "files and directories that are only their owner's",
    "kvps/server/server_process.py": "the log of a server, in its own directory",
    "kvps/server/private_server.py": "the private server's files",
    "kvps/server/watchdog.py": "the private server's lock",
    "kvps/transport/locked_file.py": "the note that tells where a copy of weights is, in the runtime directory",
    "kvps/transport/memory_identity.py": "the identity of shared memory",
    "kvps/transport/shared_memory.py": "segments",
    "monitor/kvps_monitor/loggers/csv_file.py": "the table that --log csv:PATH names",
    "monitor/kvps_monitor/loggers/event_file.py": "the curves that --log tensorboard:DIR names",
    "workers/kvps_workers/training_loop.py": "acknowledgements, for --kill-every",
}
JOINS = {  # where a path is joined to a name that the source does not say: why it stays in its directory
    "aggregator/kvps_aggregator/checkpoints.py: HistoryWriter._keep": "Checkpoint.filename went through file_name",
    "cli/kvps_cli/train/stop.py: keep": "Checkpoint.filename went through file_name",
    "cli/kvps_cli/prove/checkpoint.py: save": "the last part of the path in --to, or Checkpoint.filename",
    "kvps/connection/stand_in_process.py: _lives": "a number",
    "kvps/machine/memory.py: Memory.here": "the kernel's own files, below /proc and /sys",
    "kvps/machine/memory.py: _own_groups": "the kernel's own files, below /sys",
    "kvps/machine/memory.py: kills": "the kernel's own files, below /sys",
    "kvps/machine/process.py: _start_time": "a number",
    "kvps/machine/process.py: catches": "a number",
    "workers/kvps_workers/digits.py: _forward": "no path: numbers",
    "monitor/kvps_monitor/loggers/event_file.py: EventFile.__init__": "a job's keys have checked its name",
    "monitor/kvps_monitor/loggers/targets.py: Target.open": "a job's keys have checked its name",
    "kvps/transport/host_copy.py: HostCopy._mapped": "numbers, below /proc",
    "kvps/transport/shared_memory.py: folder_of": "a digest in hexadecimal digits",
    "kvps/transport/shared_memory.py: Segments.__init__": "Memory.of has matched it, and the id is matched there",
    **dict.fromkeys(
        (
            "kvps/transport/shared_memory.py: Segments.open",
            "kvps/transport/shared_memory.py: Segments.unlink",
            "kvps/transport/shared_memory.py: WritableSegment.__init__",
            "kvps/transport/shared_memory.py: WritableSegment.renamed",
            "kvps/transport/shared_memory.py: WritableSegment.unlink",
        ),
        "segment_of made it of a key, or it was in the directory's list",
    ),
}


class Module:
    """A module's tree, with the place of each node and with names resolved through imports."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.nodes = list(ast.walk(ast.parse(text)))
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._imported: dict[str, str] = {}
        for node in self.nodes:
            for full, alias in _imports(node):
                self._imported[alias or full.partition(".")[0]] = full if alias else full.partition(".")[0]

    def place(self, node: ast.AST) -> str:
        """Return the path and the function that a node is in."""
        names: list[str] = []
        while node := self._parents.get(node):  # type: ignore[assignment]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.insert(0, node.name)
        return f"{self.path}: {'.'.join(names)}"

    def name(self, node: ast.AST) -> str:
        """Return the full name of what was imported or is built in: np.load is numpy.load. Others begin with a dot."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, node.id if hasattr(builtins, node.id) else f".{node.id}")
        if isinstance(node, ast.Attribute):
            return f"{self.name(node.value)}.{node.attr}"
        return ""

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Yield each call with the full name of what is called."""
        yield from ((node, self.name(node.func)) for node in self.nodes if isinstance(node, ast.Call))


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what a statement imports: the full name, and the name it gets here, "" for `import a.b`."""
    if isinstance(node, ast.Import):
        yield from ((each.name, each.asname or "") for each in node.names)
    if isinstance(node, ast.ImportFrom):
        yield from ((f"{node.module}.{each.name}", each.asname or each.name) for each in node.names)


@cache
def modules() -> list[Module]:
    return [Module(p.relative_to(ROOT).as_posix(), p.read_text()) for r in PACKAGES for p in (ROOT / r).rglob("*.py")]


# -- rules: each yields the places that break it ----------------------------------------------------------------------


def code_from_data(module: Module) -> Iterator[str]:
    """Where a source names what NEVER lists, called or not, or gives an argument another value than in NEVER_SAID."""
    for node in module.nodes:
        named = [full for full, _ in _imports(node)]
        named += [module.name(node)] if isinstance(node, ast.Name | ast.Attribute) else []
        yield from (f"{module.place(node)} {name}" for name in named if _never(name))
        if isinstance(node, ast.keyword) and node.arg in NEVER_SAID:
            right = isinstance(node.value, ast.Constant) and node.value.value is NEVER_SAID[node.arg]
            yield from [] if right else [f"{module.place(node)} {node.arg}="]


def _never(name: str) -> bool:
    return f"{name}.".startswith(_NEVER)


def imports_by_name(module: Module) -> Iterator[str]:
    """import_module of what is not written there."""
    for call, name in module.calls():
        if name.endswith("import_module") and not (call.args and isinstance(call.args[0], ast.Constant)):
            yield module.place(call)


def starts_processes(module: Module) -> Iterator[str]:
    """The modules that start processes, or become another program."""
    modules = r"subprocess|pty|multiprocessing(?!\.connection)|kvps\.machine\.child_process"
    starts = re.compile(rf"({modules})\.|os\.(exec|spawn|posix_spawn)")
    yield from [module.path] if any(starts.match(name) for _, name in module.calls()) else []


def loads_libraries(module: Module) -> Iterator[str]:
    """The modules that call C."""
    loads = re.compile(r"ctypes\.(CDLL|PyDLL|cdll|pydll)|cffi\.")
    yield from [module.path] if any(loads.match(module.name(node)) for node in module.nodes) else []


def writes_files(module: Module) -> Iterator[str]:
    """The modules that make files or directories."""
    makes = ("write_text", "write_bytes", "mkdir", "makedirs", "tofile", "touch", "savez", "savetxt", "save_file")
    for call, name in module.calls():
        last = name.rpartition(".")[2]
        modes = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        opens = last in ("open", "fdopen") and any(re.fullmatch("[rbt+]*[wax+][bt+]*", mode) for mode in modes)
        if last in makes or name == "numpy.save" or opens or (name == "os.open" and "O_CREAT" in ast.unparse(call)):
            yield module.path


def joins_paths(module: Module) -> Iterator[str]:
    """Where a path is joined to what is neither in the source nor went through `file_name`."""
    handles_paths = any("pathlib" in full for node in module.nodes for full, _ in _imports(node))
    for node in module.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and not _is_fixed(module, node.right):
            looks_so = bool(re.search(r"(folder|dir|directory|path|root)\b", ast.unparse(node.left).lower()))
            numbers = _is_number(node.left) or _is_number(node.right)
            if isinstance(node.right, ast.JoinedStr) or looks_so or (handles_paths and not numbers):
                yield module.place(node)
    for call, name in module.calls():
        if name.endswith(".joinpath") or name in ("os.path.join", "posixpath.join"):
            yield module.place(call)
        if name in ("pathlib.Path", "open", "os.open") and any(isinstance(a, ast.JoinedStr) for a in call.args):
            yield module.place(call)


def _is_fixed(module: Module, node: ast.AST) -> bool:
    """Whether a name is in the source, is made of nothing that others choose, or went through `file_name`."""
    if isinstance(node, ast.JoinedStr):
        return all(_is_fixed(module, each.value) for each in node.values if isinstance(each, ast.FormattedValue))
    if isinstance(node, ast.Call):
        return module.name(node.func) in ("kvps.parsing.file_name", "os.getuid", "os.getpid", "secrets.token_hex")
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def _is_number(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("sum", "len", "min", "max", "free_bytes")
    if isinstance(node, ast.BinOp):
        return not isinstance(node.op, ast.Div)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


# -- the search -------------------------------------------------------------------------------------------------------

SHIPPED = tuple(f"{room}/" for room in PACKAGES if not room.startswith("lab/"))
RULES: dict[Callable[[Module], Iterator[str]], dict[str, str]] = {  # rule: its exceptions
    code_from_data: {},
    imports_by_name: IMPORTS,
    starts_processes: STARTS,
    loads_libraries: LOADS,
    writes_files: WRITES,
    joins_paths: JOINS,
}
EVERYWHERE = (code_from_data, imports_by_name)  # also in the benchmarks, which read nothing that others write


@pytest.mark.slow  # it parses all of the source
def test_the_source_keeps_the_rules() -> None:
    """In one test, which reads the source once."""
    for rule, exceptions in RULES.items():
        searched = [module for module in modules() if rule in EVERYWHERE or module.path.startswith(SHIPPED)]
        found = {place for module in searched for place in rule(module)}
        assert found <= set(exceptions), f"{rule.__name__}: a new exception needs its reason"
        assert set(exceptions) <= found, f"{rule.__name__}: an exception that is not needed"


BROKEN = {  # source: the rule that it breaks
    "import pickle": code_from_data,
    "import numpy as xp\nxp.load(path)": code_from_data,
    "np.frombuffer(data, allow_pickle=True)": code_from_data,
    "list(map(eval, texts))": code_from_data,
    "import subprocess\nsubprocess.run(text, shell=True)": code_from_data,
    "import os\nos.system(text)": code_from_data,
    "import importlib\nimportlib.import_module(name)": imports_by_name,
    "from importlib import import_module as load\nload(name)": imports_by_name,
    "import subprocess as s\ns.Popen(command)": starts_processes,
    "import os\nos.execv(program, command)": starts_processes,
    "import ctypes\nctypes.CDLL(name)": loads_libraries,
    "open(path, 'wb')": writes_files,
    "path.write_text(text)": writes_files,
    "import os\nos.open(path, os.O_CREAT)": writes_files,
    "folder / name": joins_paths,
    "from pathlib import Path\nx / y": joins_paths,
    "x / f'{job}.log'": joins_paths,
    "import os\nos.path.join(a, b)": joins_paths,
    "open(f'/tmp/{name}')": joins_paths,
}
KEPT = """
import os, re
import importlib
from pathlib import Path
import numpy as np
from kvps.parsing import file_name
re.compile("x")
importlib.import_module("cupy")
np.frombuffer(data)
subprocess_shell = run(command, shell=False)
Path("x") / "y" / NAME / file_name(name, "it") / f".{_IDENTITY}.{os.getuid()}"
path.open("rb")
os.open(path, os.O_RDONLY)
half = sum(x) / count + (a - b) / c + n / 1000
"""


@pytest.mark.parametrize("text", BROKEN)
def test_a_line_that_breaks_a_rule_is_found(text: str) -> None:
    assert list(BROKEN[text](Module("sample.py", text)))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_lines_that_break_no_rule_are_not_found(rule: Callable[[Module], Iterator[str]]) -> None:
    assert not list(rule(Module("sample.py", KEPT)))
