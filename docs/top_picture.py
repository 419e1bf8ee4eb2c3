"""Draws docs/images/top.svg: what `kvps top` shows of a real run on this machine. Run by `make picture`."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from kvps_monitor.live import JobWatch
from kvps_monitor.top.app import Top

import kvps
from kvps.server import private_server

COMMAND = ["up", "digits", "--workers", "4", "--staleness", "2", "--slow", "w0=5x", "--shards", "2", "--data", "units"]
EPOCHS = ["--epochs", "2000"]  # it is ended once the picture is taken
SIZE = (120, 18)
ROUNDS = 300  # of the slowest worker, so that rates and curves are those of a job that runs
MOST_S = 120


def picture() -> str:
    """Run the command on a server of its own, and return the screen as SVG."""
    private_server.start()
    run = subprocess.Popen([sys.executable, "-m", "kvps", *COMMAND, *EPOCHS, "--quiet"])
    try:
        with kvps.connect() as store:
            return asyncio.run(_screen(store, _first_job(store)))
    finally:
        run.terminate()
        run.wait()
        private_server.stop()


def _first_job(store: kvps.Store) -> kvps.Job:
    while True:
        for name in store.jobs():
            with suppress(kvps.JobNotFound):  # it is listed a moment before it is there
                return store.job(name)
        time.sleep(0.1)


async def _screen(store: kvps.Store, job: kvps.Job) -> str:
    watch, deadline = JobWatch(job), time.monotonic() + MOST_S
    app = Top(store, job.name)
    async with app.run_test(size=SIZE):
        while True:
            view = await asyncio.to_thread(watch.look)
            if len(view.workers) == 4 and min(w.committed for w in view.workers) >= ROUNDS:
                break
            assert time.monotonic() < deadline, f"version {view.version} after {MOST_S} s"
            await asyncio.sleep(0.5)
        await asyncio.sleep(1)  # the screen has looked since
        drawn = app.export_screenshot(title=f"kvps top {job.name}")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # a picture on a page loads no fonts
    return re.sub(r"terminal-\d+", "kvps-top", drawn) + "\n"


def main() -> None:
    target = Path(__file__).parent / "images" / "top.svg"
    with tempfile.TemporaryDirectory(prefix="kvps-") as folder:
        os.environ["KVPS_RUNTIME_DIR"] = folder
        target.write_text(picture())
    print(f"{target}: {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
