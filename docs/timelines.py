"""Draws docs/images/timeline-*.svg: one real run each of BSP, SSP and ASP on this machine; and graph.svg, of the run in
SSP. Run by `make timelines`.

Three worker processes train one model of 16 MB. Computing a gradient is a pause of 150 ms; from its 8th round on w0
takes three times as long. So the figures show who waits for whom, and no processor is short. All else is as in any job:
server, aggregator, weights and gradients are real. Each figure begins with the last round before w0 is slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from kvps_aggregator.aggregator import serve
from kvps_monitor import graph
from kvps_monitor.live import JobWatch

import kvps
from kvps.server import private_server

MODES = {"bsp": 0, "ssp": 2, "asp": -1}
ITEMS = 4_000_000
PAUSE_S, SLOW = 0.15, 3
ROUNDS, SLOW_FROM = 24, 8
SHOWN_S = 2.2
IMAGES = Path(__file__).parent / "images"


def work(worker: str, mode: str) -> None:
    """Be a worker: do all rounds."""
    gradient = {"w": np.full(ITEMS, 1e-3, np.float32)}
    with kvps.connect() as store, store.job(mode).join(worker) as session:
        while session.round < ROUNDS:
            session.pull()
            slow = worker == "w0" and session.round + 1 >= SLOW_FROM
            time.sleep(PAUSE_S * (SLOW if slow else 1))
            session.push(gradient)


def draw(mode: str) -> None:
    """Run a job in one of the modes and draw it."""
    with kvps.connect() as store:
        weights = {"w": np.zeros(ITEMS, np.float32)}
        job = store.create_job(mode, weights, staleness=MODES[mode], workers=3, optimizer=kvps.SGD(lr=0.1))
        for _ in range(2):  # the second stands by
            threading.Thread(target=serve, args=(job,), daemon=True).start()
        workers = [subprocess.Popen([sys.executable, __file__, "work", f"w{n}", mode]) for n in range(3)]
        if mode == "ssp":
            draw_graph(job)
        for worker in workers:
            assert worker.wait() == 0
        job.await_finished()
        write(job)


def draw_graph(job: kvps.Job) -> None:
    """Draw who is connected to whom, once the others wait for w0."""
    watch, view = JobWatch(job), None
    while not view or view.workers[0].pushed < SLOW_FROM + 2 or view.workers[1].waits_for != ["w0"]:
        view = watch.look() if len(job.state().members) == 3 else None
        time.sleep(0.01)
    target = IMAGES / "graph.svg"
    drawn = graph.as_svg(graph.as_json(job, view))
    target.write_text(drawn.replace(os.environ["KVPS_RUNTIME_DIR"], "/run/kvps"))
    print(f"{target}: version {view.version}")


def write(job: kvps.Job) -> None:
    """Draw the run from a round before w0 is slow."""
    from kvps_monitor.timeline.figure import figure
    from kvps_monitor.timeline.recording import record

    found = record(job)
    start = next(block.start_us for block in found.workers["w0"] if block.number == SLOW_FROM - 1)
    part = found.between(start, start + 1e6 * SHOWN_S)
    for kind in ("svg",) + (("png",) if os.environ.get("KVPS_PNG") else ()):
        target = IMAGES / f"timeline-{job.name}.{kind}"
        target.write_bytes(figure(part, kind))
        print(f"{target}: {target.stat().st_size // 1024} KiB, {part.iterations} rounds, {len(part.versions)} updates")


def main() -> None:
    if sys.argv[1:2] == ["work"]:
        work(*sys.argv[2:])
        return
    with tempfile.TemporaryDirectory(prefix="kvps-") as folder:
        os.environ["KVPS_RUNTIME_DIR"] = folder
        private_server.start()
        try:
            for mode in sys.argv[1:] or MODES:
                draw(mode)
        finally:
            private_server.stop()


if __name__ == "__main__":
    main()
