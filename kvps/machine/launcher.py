"""The command that launched the workers of a job: `kvps up` and `kvps run` start them as processes of their own.

The job notes the command (`JobConfig.launched_by`), and each process that it starts has the same text in its
environment. So a process knows whether it is one of them.

KVPS_LAUNCHER   the command that started this process, as JSON: its name, the identity of its process, and how many
                workers it may start
KVPS_RANK       of a copy of a script: its number, from 0
KVPS_EVALUATES  of the process that evaluates versions, and is no worker: what it is to do, see kvps.evaluator

Of a learner and its actors (kvps run --learner), as defaults of Store.publisher and Store.watch:

KVPS_JOB               the name of the job KVPS_ACTOR             of an actor: its name KVPS_CHECKPOINTS       of the
learner: where its checkpoints are, and KVPS_CHECKPOINT_EVERY how many versions lie between KVPS_RESUME            of
the learner: 1 if it goes on from the newest of them"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from kvps.machine import process
from kvps.parsing import Fields

VARIABLE, RANK, EVALUATES = "KVPS_LAUNCHER", "KVPS_RANK", "KVPS_EVALUATES"
JOB, ACTOR, RESUME = "KVPS_JOB", "KVPS_ACTOR", "KVPS_RESUME"
CHECKPOINTS, CHECKPOINT_EVERY = "KVPS_CHECKPOINTS", "KVPS_CHECKPOINT_EVERY"
EVALUATOR = "evaluator"
_MOST_WORKERS = 4_096


class Launcher(NamedTuple):
    """A command that launched the workers of a job, and the process that it is or was.

    most   how many workers it may start: they are w0, w1, and so on; 0 if it said nothing, as earlier ones
    run    the name of the run whose jobs they train, see kvps.run_jobs; "" if it has one job
    """

    command: str
    host: str
    pid: int
    start: str
    space: str
    most: int = 0
    run: str = ""

    @classmethod
    def of(cls, text: str) -> Launcher:
        """Read the text that a job notes. Raises CorruptData if it names no launcher."""
        f = Fields.of_json(text, "the launcher")
        most, run = f.whole("most", high=_MOST_WORKERS, default=0), f.text("run", default="")
        return cls(
            f.text("command"), f.text("host"), f.whole("pid", 1, 2**31), f.text("start"), f.text("space"), most, run
        )

    @property
    def is_dead(self) -> bool:
        """Whether its process is certainly gone; False on another machine, where that is unknown."""
        return process.is_dead(self._asdict())

    @property
    def is_elsewhere(self) -> bool:
        """Whether the launcher is where this process cannot see if it is alive."""
        return self.space == "" or self.space != process.identity()["space"]

    def __str__(self) -> str:
        return f"{self.command} (process {self.pid} on {self.host})"


def this_process(command: str, most: int = 0, run: str = "") -> str:
    """Return the text that a job notes of this process, which runs `command` and may start up to `most` workers of the
    jobs of a `run`."""
    me = process.identity() | {"command": command, "most": most, "run": run}
    return json.dumps({name: me[name] for name in Launcher._fields})


def own() -> str:
    """Return the text of the command that launched this process, as its job notes it; "" if no such command did."""
    return os.environ.get(VARIABLE, "")


def own_most() -> int:
    """Return how many workers the command that launched this process may start; 0 if no such command did."""
    return Launcher.of(own()).most if own() else 0


def evaluates() -> bool:
    """Whether this process is the one that evaluates versions beside the workers that the same command launched."""
    return bool(own() and os.environ.get(EVALUATES))


def own_name() -> str:
    """Return the name of this process in its run: a worker, or evaluator; "" if it is neither."""
    return EVALUATOR if evaluates() else own_worker()


def own_rank(otherwise: int) -> int:
    """Return the number of this process as a copy of a script; `otherwise` if it is none."""
    rank = os.environ.get(RANK, "")
    return int(rank) if rank.isdecimal() else otherwise


def own_worker() -> str:
    """Return the worker that this process is as a copy of a script; "" if it is none."""
    rank = os.environ.get(RANK, "")
    return f"w{rank}" if own() and rank.isdecimal() else ""
