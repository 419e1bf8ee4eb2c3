"""The work of a forked child: a worker (of the suite's own model, or of the job's task) or an aggregator of one job, or
the proxy, until it ends or is killed."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from helpers.harness import gradient, model
from helpers.internals import replaced
from kvps_aggregator import Aggregator
from kvps_aggregator.shard import lifecycle, mirror, storage_redis
from kvps_aggregator.verify.replay import Encode
from kvps_workers.training_loop import train

from chaos import mutants, points, proxy
from kvps.arrays import layout
from kvps.arrays.formats import Bytes
from kvps.arrays.layout import Array
from kvps.connection.client import Client
from kvps.connection.cluster import open_client
from kvps.device.base import CPU
from kvps.errors import ContributionLate, ServerError, WorkerEvicted
from kvps.job import Job, await_unit
from kvps.machine import process
from kvps.protocol.job_state import State
from kvps.protocol.plan import Contribution
from kvps.session.session import Session

FULL = 3  # the exit code of a child that a full server refused


def main() -> NoReturn:
    """Do what the argument says, a dict in JSON, when the input has ended. Never returns."""
    sys.stdin.read()
    spec = json.loads(sys.argv[1])
    code = 1
    try:
        process.die_with_parent(os.getppid())
        if spec.get("log"):
            logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(process)d %(name)s: %(message)s")
        _set(lifecycle, "_LINGER_VERSIONS", 2)  # as for a large model
        if spec.get("job", "").endswith(tuple("13579")) or spec.get("damages"):
            # Every other job acts like a large one: bytes are stored before the script's call, dead bytes are renamed.
            _set(Client, "small_bytes", 0)
            _set(storage_redis, "_REUSED_BYTES", 0)
        _set(layout, "CHUNK_ITEMS", spec.get("chunk_items", layout.CHUNK_ITEMS))
        _set(mirror, "EVERY_S", spec.get("mirror_s", mirror.EVERY_S))
        for name in spec.get("mutants", ()):
            mutants.MUTANTS[name].apply()
        if arms := spec.get("arm"):
            points.arm(arms["point"], arms["nth"], arms["signal"], spec["notes"])
        _ROLES[spec["role"]](spec)
        code = 0
    except ServerError as error:
        code = FULL if "memory" in str(error) else 1
        print(f"{spec['role']} {spec.get('name')}: {error}", file=sys.stderr)
    except BaseException:
        print(f"{spec['role']} {spec.get('name')}:\n{traceback.format_exc()}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _job(spec: dict[str, Any]) -> Job:
    client = open_client(spec["url"])
    return Job(client.twin(spec["patience_s"]) if "patience_s" in spec else client, spec["job"])


def _set(where: object, name: str, value: int) -> None:
    """Replace a constant. Raises AttributeError if it does not live there any more: the run would be a milder one."""
    getattr(where, name)
    setattr(where, name, value)


def _worker(spec: dict[str, Any]) -> None:
    job, takeover = _job(spec), bool(spec.get("takeover"))
    while True:
        try:
            with job.join(spec["name"], takeover=takeover) as session:
                _work(job, session, spec)
        except WorkerEvicted:
            if takeover and job.state().members[spec["name"]].pid != os.getpid():
                return  # another worker has taken the id over in turn
            continue
        if not job.config.units or not await_unit(job):
            return


def _work(job: Job, session: Session, spec: dict[str, Any]) -> None:
    rng = np.random.default_rng(spec.get("seed", 0))
    damages = float(spec.get("damages", 0))
    while True:
        unit = session.next_unit() if job.config.units else None
        if unit is None and (job.config.units or session.round >= spec["rounds"] or Path(spec["over"]).exists()):
            return
        params = session.pull()
        time.sleep(spec.get("computes_s", 0.0))  # the weights are in use meanwhile
        grads = computed(params, session.rank, session.round, unit)
        try:
            with _damaging(job, session) if damages and rng.random() < damages else nullcontext():
                session.push(grads)
        except ContributionLate:
            continue
        points.note(spec["acks"], f"{session.worker} {session.incarnation} {session.sequence}\n".encode())


@contextmanager
def _damaging(job: Job, session: Session) -> Iterator[None]:
    """A block in which stored bytes do not match their digest, as if memory or a cable had changed them."""
    scripts, sequence = session._access.scripts, session.sequence + 1
    key = job.access.keys.gradient(job.layout.shards - 1, session.worker, session.incarnation, sequence, 0)
    real = scripts.push

    def push(*arguments: Any, **named: Any) -> Any:
        job.access.client.call("SETRANGE", key, 2, "\x3d")
        return real(*arguments, **named)

    with replaced(scripts, "push", push):
        yield


def computed(params: dict[str, Array], rank: int, rounds_done: int, unit: int | None) -> dict[str, Array]:
    """Return the gradient of a contribution: a unit's is the same for every worker, others depend on rank and round."""
    return gradient(params, rank, rounds_done) if unit is None else gradient(params, 4096, unit)


def _trainer(spec: dict[str, Any]) -> None:
    """Train the job's own task, with `slow` as `kvps worker --slow`, from `waits_s` on."""
    time.sleep(spec.get("waits_s", 0.0))
    train(_job(spec), CPU, spec["name"], spec.get("slow", 1.0))


def _aggregator(spec: dict[str, Any]) -> None:
    Aggregator(_job(spec), threading.Event(), spec.get("shards")).run(until_finished=True)


_ROLES = {"worker": _worker, "trainer": _trainer, "aggregator": _aggregator, "proxy": proxy.serve}


class Recomputed:
    """The contributions of `_work`, computed again for the replay."""

    proof = "recomputed"
    wants_weights = True

    def __init__(self, job: Job, state: State) -> None:
        self._layout = job.layout
        self._ranks = {member.worker: member.rank for member in state.members.values()}

    def initial(self) -> Array:
        """Return version 0."""
        return np.concatenate(self._layout.hosted(model(), "parameter"))

    def contribution(self, c: Contribution, weights: Array | None, encode: Encode) -> Bytes:
        """Return the contribution, computed on its base version."""
        assert weights is not None
        grads = computed(dict(self._layout.views(weights)), self._ranks[c.worker], c.round - 1, c.unit)
        return encode(np.concatenate(self._layout.hosted(grads, "gradient")))

    def otherwise(self, contribution: Contribution, shard: int) -> str:
        """Return why the contribution may differ."""
        return "the contribution is not the one that was computed"
