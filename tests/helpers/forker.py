"""A worker that forks in the middle of its first push; the command line names what its children do.

    python tests/helpers/forker.py URL JOB CHILD[,CHILD...] [--prefetch]

For each child in turn it prints the name, the exit status, how many commands the server got from before the fork until
the child had ended, and whether its own connections are the same as before. Then it continues with its rounds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import redis
from helpers.harness import gradient, large_model
from kvps_aggregator import serve

import kvps
from kvps.session import heartbeat

ROUNDS = 4
_FORKING = multiprocessing.get_context("fork")
_here: dict[str, Any] = {}


def _refused(call: Callable[[], Any]) -> None:
    words = f"belongs to process {os.getppid()}, of which this one is a fork: connect and join anew here"
    with pytest.raises(kvps.WrongOrder, match=words):
        call()


def _use_all() -> None:
    """Assert that every call on the parent's objects is refused."""
    store, job, session, grads = _here["store"], _here["job"], _here["session"], _here["grads"]
    for call in (
        session.pull,
        session.buffers,
        session.leave,
        lambda: session.push(grads),
        lambda: session.put("W", grads["W"]),
        job.state,
        job.snapshot,
        job.checkpoint,
        job.access.reader.inbox,
        lambda: job.join("w0", takeover=True),
        lambda: store.job("job"),
        lambda: store.remove_job("job"),
        lambda: store.create_job("other", grads),
        lambda: store.client.call("FLUSHALL"),
        store.client.preflight,
        store.client.memory,
        store.client.run_id,
        lambda: list(store.client.scan("*")),
        lambda: serve(job),
    ):
        _refused(call)


def _closes_all() -> None:
    _here["session"].__exit__(None, None, None)
    _here["store"].close()
    _here["store"].client.close()


def _collects() -> None:
    _here.clear()
    gc.collect()


def _raises() -> None:
    raise ValueError("of the child")


def _connects_anew() -> None:
    """Open the same job over new connections. The server counts what this sends, so no test of counts uses it."""
    _use_all()
    with kvps.connect(sys.argv[1]) as store:
        job = store.job("job")
        assert job.snapshot()[0] == 0
        with pytest.raises(kvps.WorkerAlive, match=f"process {os.getppid()} on"):
            job.join("w0")
        with store.create_job("of-the-child", _here["grads"]).join("w0") as session:
            session.pull()
            assert session.push(_here["grads"]) == 1
        store.remove_job("of-the-child")


CHILDREN: dict[str, Callable[[], Any]] = {
    "uses": _use_all,
    "exits": lambda: sys.exit(0),
    "raises": _raises,
    "closes": _closes_all,
    "collects": _collects,
    "connects": _connects_anew,
}


def _fork(child: str) -> int:
    """Fork a child that does what `child` names and leaves its with blocks as any script does; return its status."""
    if child == "process":
        process = _FORKING.Process(target=_use_all)
        process.start()
        process.join()
        return int(process.exitcode or 0)
    if child == "pool":
        with ProcessPoolExecutor(1, mp_context=_FORKING) as pool:
            pool.submit(_use_all).result()
        return 0
    name, _, ends = child.partition("-")
    if not (pid := os.fork()):
        CHILDREN[name]()
        if ends:
            os._exit(0)
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _ids(admin: Any) -> list[str]:
    return sorted(c["id"] for c in admin.client_list() if c["name"].startswith(f"kvps-{os.getpid()}-"))


def main(url: str, job: str, children: str, prefetch: bool) -> None:
    heartbeat._SLOWEST_S = 3_600  # commands are counted, and signs of life would be among them
    admin = redis.Redis.from_url(url, protocol=2)

    def seen() -> int:
        return int(admin.info("stats")["total_commands_processed"])

    store = kvps.connect(url)
    with store, store.job(job).join("w0", prefetch=prefetch) as session:
        _here.update(store=store, job=store.job(job), session=session)
        for round_ in range(ROUNDS):
            params = session.pull()
            grads = gradient(large_model() if prefetch else params, 0, round_)  # the version it has then is chance
            _here["grads"] = grads
            if round_ == 0:
                session.put("V", grads.pop("V"))
                ids = _ids(admin)
                for child in children.split(","):
                    before = seen()
                    print(child, _fork(child), seen() - before - 1, _ids(admin) == ids, flush=True)
            session.push(grads)
            _here.pop("grads", None)


if __name__ == "__main__":
    main(*sys.argv[1:4], prefetch="--prefetch" in sys.argv)
