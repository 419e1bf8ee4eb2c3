"""`kvps_bench actors`: from a learner's publish until the last of its actors has the version.

The learner changes a share of a bfloat16 model by one unit in the last place, as fine-tuning does. Its actors get the
version by its difference, whole, or as a file of safetensors over HTTP. They are on the learner's host, or all on
another one behind a link of a given rate.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import ml_dtypes
import numpy as np
import safetensors.numpy
from kvps_cli.output import say

from kvps_bench.crew import Lab, Member, crew, together
from kvps_bench.hosts import Host, Network, NoHosts
from kvps_bench.links import node
from kvps_bench.result import Bar, Figures, Row
from kvps_bench.roles import Role
from kvps_bench.turns import Case, Times, in_turns

_BAR, _MOST_RATIO = 23, 1.0
_DIFFERENCE, _WHOLE, _FILE = "difference", "whole", "safetensors over HTTP"
_CASES = {_DIFFERENCE: "update", _WHOLE: "load", _FILE: "download"}
NOTES = (
    "One time is from the call of publish until the last actor has the version in an array of its own. `wait_ms` is "
    "how long the learner waits in `publish(wait=False)`; `read_mb` is what all actors together read of a version.",
)


class Learner(Role):
    """The learner, whose model has one array of bfloat16."""

    def __init__(self, url: str, name: str, nbytes: int, share: float) -> None:
        super().__init__(url)
        self._rng = np.random.default_rng(0)
        values = self._rng.normal(0, 0.02, nbytes // 2).astype(np.float32)
        self._model = {"w": values.astype(ml_dtypes.bfloat16)}
        self._changes = max(1, round(share * values.size))
        self._policy = self.store.publisher(name, self._model)
        self._folder = tempfile.TemporaryDirectory(prefix="kvps-bench-")
        handler = partial(_Quiet, directory=self._folder.name)
        self._server = ThreadingHTTPServer(("0.0.0.0", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def port(self) -> int:
        """Return the port of its HTTP server."""
        return self._server.server_address[1]

    def publish(self, as_file: bool) -> tuple[int, float, float]:
        """Change the model and publish it. Return the version, when that began, and how long the learner waited."""
        bits = self._model["w"].view(np.uint16)
        bits[self._rng.integers(0, bits.size, self._changes)] += np.uint16(1)
        began = time.monotonic()
        if as_file:
            arrays = {"w": bits}
            aside = Path(self._folder.name) / "aside"
            safetensors.numpy.save_file(arrays, aside)
            aside.rename(Path(self._folder.name) / "model")
            return 0, began, time.monotonic() - began
        self._policy.publish(self._model, wait=False)
        waited = time.monotonic() - began
        return self._policy.wait(), began, waited

    def close(self) -> None:
        self._server.shutdown()
        self._policy.close()
        self._folder.cleanup()
        super().close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class Actor(Role):
    """An actor with arrays of its own."""

    def __init__(self, url: str, name: str, file: str) -> None:
        super().__init__(url)
        self._name, self._file = name, file
        self._policy = self.store.watch(name)
        self._policy.update()
        self._target = {name: array.copy() for name, array in self._policy.arrays.items()}

    def update(self, version: int) -> tuple[float, int]:
        """Have at least this version; return when it was there, and how many bytes were read."""
        before = self._policy.traffic.nbytes
        while self._policy.update(self._target, wait=60) < version:
            pass
        return time.monotonic(), self._policy.traffic.nbytes - before

    def load(self, version: int) -> tuple[float, int]:
        """As `update`, by a whole read."""
        with self.store.watch(self._name) as fresh:
            assert fresh.load(self._target) >= version
            return time.monotonic(), fresh.traffic.nbytes

    def download(self, _: int) -> tuple[float, int]:
        """As `update`, from a file of safetensors over HTTP."""
        with urlopen(self._file) as answer:
            data = answer.read()
        self._target["w"].view(np.uint16)[:] = safetensors.numpy.load(data)["w"]
        return time.monotonic(), len(data)


class _Publishing:
    """A case: publish, and have all actors get it."""

    def __init__(self, learner: Member, actors: Sequence[Member], method: str) -> None:
        self._learner, self._actors, self._method = learner, list(actors), method
        self.waits: list[float] = []
        self.nbytes = 0

    def __call__(self) -> list[float]:
        version, began, waited = self._learner("publish", self._method == "download")
        got = together(self._actors, self._method, version)
        self.waits.append(waited)
        self.nbytes = sum(nbytes for _, nbytes in got)
        return [max(at for at, _ in got) - began]

    def figures(self) -> Figures:
        return {"wait_ms": round(1000 * float(np.median(self.waits)), 1), "read_mb": round(self.nbytes / 1e6, 2)}


def measure(lab: Lab, nbytes: int, count: int, share: float, gbits: Sequence[float]) -> Iterator[Row | Bar]:
    """Measure with `count` actors on the learner's host (a rate of 0), or behind a link of each rate in Gbit/s."""
    for gbit in gbits:
        about = {"gbit": gbit, "mb": nbytes / 1e6, "actors": count, "share": share}
        where = f"{gbit:g} Gbit/s" if gbit else "one host"
        say(f"{where}, {nbytes / 1e6:g} MB, {count} actors")
        try:
            times, cases = _measured(lab, nbytes, count, share, gbit)
        except NoHosts as refused:
            yield Row(_DIFFERENCE, "tcp", about, why=str(refused))
            continue
        for case in _CASES:
            yield Row(case, "tcp" if gbit else "unix", about, times[case], cases[case].figures())
        for other in (_WHOLE, _FILE):
            what = f"{where}: a {_DIFFERENCE} over {other}"
            yield Bar(_BAR, what, True, _MOST_RATIO, times[_DIFFERENCE].over(times[other]))


def _measured(
    lab: Lab, nbytes: int, count: int, share: float, gbit: float
) -> tuple[dict[str, Times], dict[str, _Publishing]]:
    name = f"bench-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        here: tuple[Host, ...] = ()
        there: tuple[Host, ...] = ()
        url, address = lab.place.urls["unix"], "127.0.0.1"
        if gbit:
            first, second = stack.enter_context(Network(2, gbit * 1e9))
            url, address = stack.enter_context(node(first, cluster=False)), first.address
            here, there = (first,), (second,)
        (learner,) = stack.enter_context(crew((*here, Learner, url, name, nbytes, share)))
        file = f"http://{address}:{learner('port')}/model"
        actors = stack.enter_context(crew(*[(*there, Actor, url, name, file)] * count))
        cases = {case: _Publishing(learner, actors, method) for case, method in _CASES.items()}
        runs: dict[str, Case] = dict(cases)
        return in_turns(runs, lab.turns), cases
