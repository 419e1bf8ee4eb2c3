"""The process that works on one task: started fresh, never forked, because CUDA does not survive a fork.

``python -m kvps_workers.queue.task_process`` reads a line of JSON from its standard input: the task, which its host has
checked, and the server's URL, which therefore is in no command line and no environment. The process knows nothing of
queues. It loads built-in tasks and those that the host's operator allowed, no others. When its input closes, it leaves
its job and ends. The input closes when the host ends, in whatever way.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from kvps.device.base import open_device
from kvps.errors import CorruptData, InvalidTask, JobNotFound, KvpsError, NoServer, ServerLost, WorkerAlive
from kvps.job import Job
from kvps.machine.process import own_input
from kvps.protocol.answers import job_not_found
from kvps.store import Store, connect
from kvps_workers.queue.worker_task import WorkerTask
from kvps_workers.task import BUILT_IN
from kvps_workers.training_loop import train

AWAY, REMOVED = 75, 66  # exit codes for a lost server and a removed job: not the task's fault

log = logging.getLogger("kvps.task")


def main() -> int:
    """Run the task from standard input. Return 0 when done, 1 if it fails, AWAY, REMOVED, or 143 if told to end."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        orders = own_input()
        line = orders.readline()
        if not line.endswith(b"\n"):
            return 128 + signal.SIGTERM
        threading.Thread(target=_end_with_host, args=(orders.fileno(),), name="kvps-host", daemon=True).start()
        logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
        order = json.loads(line)
        work(WorkerTask(**order.pop("task")), **order)
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM
    except KvpsError as error:
        if os.environ.get("KVPS_TRACEBACK"):
            traceback.print_exception(error)
        print(f"kvps: error: {' '.join(str(error).split())}", file=sys.stderr)
        if isinstance(error, JobNotFound):
            return REMOVED
        return AWAY if isinstance(error, NoServer | ServerLost) else 1
    except SystemExit as error:  # raised by the user's task
        print(f"kvps: error: the task ended its process (exit {error.code})", file=sys.stderr)
        return 1


def work(task: WorkerTask, url: str, allowed: list[str], gpu: int | None, acks: str | None) -> None:
    """Train as this worker of this job until no batch is left. Raises what `training_loop.train` raises, JobNotFound,
    CorruptData, and InvalidTask for a task that is not allowed here."""
    device = open_device(gpu)
    with connect(url) as store:
        job = _open(store, task)
        check_allowed(job.config.metadata.task, allowed)
        waits = False
        while True:
            try:
                train(job, device, task.worker, task.slow, Path(acks) if acks else None, task.prefetch)
                return
            except WorkerAlive as alive:
                if not waits:
                    log.info("waits: %s", alive)
                waits = True
            # The other process's leave or eviction ends this wait. Its silence does not, so try again every second.
            job.access.reader.await_change(job.state())


def _open(store: Store, task: WorkerTask) -> Job:
    """Return the task's job. Raises JobNotFound, CorruptData."""
    try:
        job = store.job(task.job)
    except KvpsError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # as reading JSON and hashes raises them
        raise CorruptData(f"job {task.job!r} cannot be read ({type(error).__name__}: {error})") from error
    if job.id != task.id:
        raise job_not_found(task.job)
    return job


def check_allowed(task: str, allowed: list[str]) -> None:
    """Raise InvalidTask unless a task is built in, or the operator of this host has listed its name."""
    if task not in BUILT_IN and task not in allowed:
        raise InvalidTask(
            f"task {task!r} is not allowed on this host: its operator allows it with "
            f"kvps worker --queue --allow MODULE:ATTRIBUTE, in the directory where it is"
        )


def _end_with_host(orders: int) -> None:
    """End this process when its host ends: the host holds the other end of what it is told until then."""
    while os.read(orders, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _interrupt(number: int, _: FrameType | None) -> None:
    """Raise KeyboardInterrupt, so that `finally` blocks run; a second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
