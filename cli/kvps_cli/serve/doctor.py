"""`kvps doctor`: whether this server and this machine are fit for training, and what to do where they are not."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer

from kvps.arrays.layout import DTYPE, Layout
from kvps.arrays.pieces import Parameter
from kvps.config import JobConfig
from kvps.connection.client import Client
from kvps.connection.server_health import ADVICE, OK, WRONG, Finding, LogSize, of_clock, of_latency, of_logs, of_server
from kvps.device.base import open_device
from kvps.errors import KvpsError, NotPermitted, ServerFull, ServerUnfit, counted
from kvps.machine.memory import Memory, overcommits
from kvps.optim import Adam
from kvps.parsing import bytes_text
from kvps.protocol.keys import JobKeys
from kvps.store import Store
from kvps.transport import shared_memory
from kvps.transport.choice import is_near
from kvps_cli import connect, options
from kvps_cli.output import print_json
from kvps_cli.tables import plain_console

_SECTIONS = ("server", "memory", "persistence", "clients", "replication", "stats")
_ASKED = 100  # short requests whose times are taken
_SETTINGS = (
    "save",
    "maxclients",
    "client-output-buffer-limit",
    "maxmemory-clients",
    "busy-reply-threshold",
    "lua-time-limit",
)
_MARKS = {OK: "ok", ADVICE: "advice", WRONG: "WRONG"}
_NEWEST = 200  # entries of a log that its rate is taken from
_STILL_S = 60.0
_MB = 1_000_000


def doctor(
    model: Annotated[
        float | None,
        typer.Option(
            "--model", metavar="MB", min=0.000001, max=32_000, help="Size of the weights to train, in float32."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, max=10_000, help="How many workers will train it.")
    ] = 3,
    as_json: options.AsJson = False,
    redis: options.Redis = None,
) -> None:
    """Say what is wrong with the server and with this machine, and what to do about it.

    It says too what could be better, and with --model whether there is room for it. Nothing is changed. The exit code
    is 1 if anything is wrong.
    """
    try:
        with connect.existing_store(redis) as store:
            findings = [*_server(store), *_room(store, model, workers), *_machine()]
    except ServerUnfit as unfit:
        findings = [*_refused(connect.existing_url(redis), unfit, model), *_machine()]
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        console, width = plain_console(), max(len(finding.about) for finding in findings)
        for finding in findings:
            console.print(f"{_MARKS[finding.verdict]:<6}  {finding.about:<{width}}  {finding.found}")
            if finding.remedy:
                console.print(f"{'':<6}  {'':<{width}}  -> {finding.remedy}")
    if any(finding.verdict == WRONG for finding in findings):
        raise typer.Exit(1)


def _server(store: Store) -> Iterator[Finding]:
    nodes = store.client.on_masters(lambda node: list(of_server(_info(node), _config(node))))
    for number, findings in enumerate(nodes):
        where = f" of master {number + 1}" if len(nodes) > 1 else ""
        yield from (finding._replace(about=finding.about + where) for finding in findings)
    yield _replicas(store.client)
    yield from _logs(store)
    if is_near(store.client) and _forks(store.client) and not overcommits():
        yield Finding(
            "overcommit",
            ADVICE,
            "vm.overcommit_memory is not 1: with little memory left, the server cannot fork to write its file",
            "sysctl vm.overcommit_memory=1",
        )
    yield _user(store.client)
    yield of_latency([_seconds(store.client) for _ in range(_ASKED)])
    yield _clock(store.client)


def _refused(url: str, unfit: ServerUnfit, model: float | None) -> Iterator[Finding]:
    """What can be seen of a server that every other command refuses."""
    yield Finding("server", WRONG, str(unfit), "mend that first: kvps trains nothing on this server")
    with suppress(KvpsError), Client(url) as node:
        yield from of_server(_info(node), _config(node))
        yield of_latency([_seconds(node) for _ in range(_ASKED)])
        yield _clock(node)
    if model is not None:
        yield Finding(_room_for(model), ADVICE, "not looked at on such a server", "ask again when it is mended")


def _info(node: Client) -> Mapping[str, Any]:
    return {name: value for section in _SECTIONS for name, value in node.call("INFO", section).items()}


def _config(node: Client) -> Mapping[str, str] | None:
    """Return the settings in question; None if this user, or a rented server, does not let them be read."""
    try:
        pairs = [node.call("CONFIG", "GET", name) for name in _SETTINGS]  # [name, value], or [] if it has no such name
    except KvpsError:
        return None
    return dict(pair for pair in pairs if pair)


def _replicas(client: Client) -> Finding:
    attached = client.attached()
    why, remedy = attached.why_not_all()
    if not attached.most:
        return Finding("replicas", OK, "none: --durability replicated would be refused")
    if why:
        return Finding("replicas", ADVICE, f"{why}: --durability replicated would be refused", remedy)
    return Finding("replicas", OK, f"{attached.fewest} of each server" if client.is_cluster else str(attached.fewest))


def _logs(store: Store) -> Iterator[Finding]:
    """The sizes of the commit logs, if there are any and this user may ask, and how fast the fastest one grows."""
    with suppress(NotPermitted):
        if logs := [_log_size(store, name) for name in store.jobs()]:
            yield of_logs(logs)


def _log_size(store: Store, name: str) -> LogSize:
    """Return the size of a job's log, and its rate: 0 if nothing was written to it for a minute."""
    key = JobKeys(name).commits
    server = store.client.node(key)
    entries, nbytes = int(server.call("XLEN", key)), int(server.call("MEMORY", "USAGE", key) or 0)
    times = [int(id.partition("-")[0]) / 1000 for id, _ in server.call("XREVRANGE", key, "+", "-", "COUNT", _NEWEST)]
    stands_still = len(times) < 2 or server.seconds() - times[0] > _STILL_S
    per_s = 0.0 if stands_still else len(times) / max(0.001, times[0] - times[-1])
    return LogSize(name, entries, nbytes, per_s * nbytes / max(1, entries))


def _user(client: Client) -> Finding:
    try:
        name = str(client.call("ACL", "WHOAMI"))
    except NotPermitted:
        return Finding("user", OK, "one with few rights, as kvps acl makes them")
    if name != "default":
        return Finding("user", OK, name)
    if client.url.startswith("unix:"):
        return Finding("user", OK, "default, on a private socket")
    return Finding(
        "user", ADVICE, "default, which may do everything", "kvps acl JOB --role ROLE makes users with fewer rights"
    )


def _seconds(client: Client) -> float:
    began = time.perf_counter()
    client.call("PING")
    return time.perf_counter() - began


def _clock(client: Client) -> Finding:
    """The offset of the fastest of ten answers: half of its time is the most by which it can be wrong (as NTP does)."""
    best = (float("inf"), 0.0)
    for _ in range(10):
        began = time.time()
        seconds, micros = client.call("TIME")
        ended = time.time()
        best = min(best, (ended - began, int(seconds) + int(micros) / 1e6 - (began + ended) / 2))
    return of_clock(best[1], best[0] / 2)


def _room(store: Store, model: float | None, workers: int) -> Iterator[Finding]:
    """Whether a job of that size fits, with Adam, whose state is twice the weights, as `create_job` will ask."""
    if model is None:
        return
    items = max(1, round(model * _MB / DTYPE.itemsize))
    layout = Layout((Parameter("model", (items,), 0),), 1)
    about = _room_for(model)
    try:
        needs = store.check_room("model", JobConfig(workers=workers, optimizer=Adam(), transport="redis"), layout)
    except ServerFull as full:
        yield Finding(about, WRONG, str(full).partition(": ")[0], "raise maxmemory, remove jobs, or have fewer workers")
        return
    found, memory = f"at most {bytes_text(needs)} for {counted(workers, 'worker')} and Adam", Memory.here()
    if not memory or not is_near(store.client):
        yield Finding(about, OK, found)
        return
    if _forks(store.client):
        needs = 2 * needs + store.client.memory()[0]  # all that it has is copied if all is written meanwhile
        found += f", {bytes_text(needs)} while a fork of the server writes its file anew"
    remedy = "" if needs <= memory.free else "make or give it more room, have fewer workers, or keep nothing on disk"
    yield Finding(about, WRONG if remedy else OK, f"{found}; {memory}", remedy)


def _forks(client: Client) -> bool:
    """Return whether a server writes its data to a disk, which a fork of it does."""
    return not client.is_cluster and (
        str(_info(client).get("aof_enabled")) == "1" or bool((_config(client) or {}).get("save", "").strip())
    )


def _room_for(model: float) -> str:
    return f"room for {model:g} MB"


def _machine() -> Iterator[Finding]:
    if memory := Memory.here():
        yield Finding("machine", OK, str(memory))
    if not shared_memory.available():
        yield Finding("shared memory", OK, "this machine has none: arrays go through Redis")
    elif (free := min(shared_memory.free_bytes(), memory.free if memory else 1 << 62)) < 64 * _MB:
        yield Finding(
            "shared memory",
            ADVICE,
            f"{bytes_text(free)} left",
            "make room there (in a container: docker run --shm-size)",
        )
    else:
        yield Finding("shared memory", OK, f"{bytes_text(free)} left in {shared_memory.ROOT}")
    if not importlib.util.find_spec("cupy"):
        yield Finding("GPU", OK, "CuPy is not installed: workers here compute with NumPy")
        return
    try:
        open_device(0)
    except KvpsError as error:
        yield Finding("GPU", ADVICE, "CuPy is installed and cannot use GPU 0", str(error))
    else:
        yield Finding("GPU", OK, "workers here can use GPU 0: --gpu 0")
