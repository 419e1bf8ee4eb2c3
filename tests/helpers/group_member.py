"""A process that is one member of a process group that is one worker: its argument is a `Member` in JSON.

It trains `rounds` rounds on the batches of `data`. If a member dies, it makes a group with whoever comes instead, and
is the leader there. With `die`, it kills itself at that point of round `die_in`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.ddp import loss_of, net

import kvps
import kvps.torch
from kvps.session.session import Session
from kvps.torch import group

POINTS = {  # where a member may die: what is called there, and whether it dies before or after that
    "pulled, untold": (Session, "pull_flat", "after"),
    "computing": (group.GroupSession, "push", "before"),
    "sending its gradient": (group._Channel, "reduce", "before"),
    "added up": (group._Channel, "reduce", "after"),
    "acknowledged, untold": (Session, "push", "after"),
    "told": (group.GroupSession, "push", "after"),
}


@dataclass
class Member:
    """What a member is told: `data` says whose batches it computes, `rank` and `size` are those of its first group."""

    url: str
    job: str
    worker: str
    data: int
    rank: int
    size: int
    folder: str
    rounds: int
    generation: int = 0
    die: str = ""
    die_in: int = 0


def main(me: Member) -> None:
    torch.set_num_threads(1)
    job, model = kvps.connect(me.url).job(me.job), net()
    calls = 0

    def dies(call: Callable[..., Any], when: str) -> Callable[..., Any]:
        def dying(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > me.die_in and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments)
            if calls > me.die_in:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return dying

    if me.die:
        owner, name, when = POINTS[me.die]
        setattr(owner, name, dies(getattr(owner, name), when))
    while True:
        meet = f"file://{Path(me.folder) / me.worker}.{me.generation}"
        dist.init_process_group("gloo", meet, rank=me.rank, world_size=me.size, timeout=timedelta(seconds=60))
        try:
            with kvps.torch.join(job, model, me.worker, group=dist.group.WORLD, takeover=me.generation > 0) as worker:
                print(f"{me.worker} {me.data} joined in round {worker.session.round}", flush=True)
                while worker.session.round < me.rounds:
                    worker.pull()
                    loss = loss_of(model, me.data, worker.session.round)
                    loss.backward()
                    worker.step(loss)
            dist.destroy_process_group()
            return
        except kvps.GroupLost as error:
            print(f"{me.worker} {me.data} lost: {error}", flush=True)
            dist.destroy_process_group()
            me.generation, me.rank = me.generation + 1, 0


if __name__ == "__main__":
    main(Member(**json.loads(sys.argv[1])))
