"""One learner of torchft's DiLoCo, whose local steps take a known time, as those of `kvps_bench.paced_learner` do.

Each sync that counts appends a line to its file: the time in ms, the step, and how many learners are in it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path

try:
    import torch
    import torch.distributed
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo
except ImportError as error:
    raise SystemExit(f"torchft: {error}") from None

BATCH = 32
TIMEOUT = timedelta(seconds=10)


def step_s(asked, folder):
    """Return the seconds that a step takes now."""
    slow = folder / "slow"
    for_s = time.time() - float(slow.read_text()) if slow.exists() else -1
    is_slow = for_s >= 0 and int(for_s / asked["slow_every_s"]) % asked["workers"] == asked["rank"]
    return asked["step_ms"] / 1000 * (asked["slow"] if is_slow else 1)


def main():
    asked = json.loads(sys.argv[1])
    folder, steps = Path(asked["folder"]), asked["local_steps"]
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=0.003)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        outer.load_state_dict(state["outer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict(), "outer": outer.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=asked["lighthouse"],
        replica_id=f"{asked.get('name', 'r')}{asked['rank']}",
        hostname="127.0.0.1",
    )
    random = torch.Generator().manual_seed(asked["rank"])
    with DiLoCo(manager, [model], inner, outer, sync_every=steps):
        while not (folder / "stop").exists():
            at, before = time.monotonic(), manager.current_step()
            for _ in range(steps):
                at += step_s(asked, folder)
                x = torch.randn(BATCH, 64, generator=random)
                inner.zero_grad()
                torch.nn.functional.cross_entropy(model(x), x.argmax(1) % 10).backward()
                time.sleep(max(0, at - time.monotonic()))
                inner.step()
            if manager.current_step() > before:
                with (folder / f"r{asked['rank']}.syncs").open("a") as file:
                    line = (int(1000 * time.time()), manager.current_step(), manager.num_participants())
                    file.write(" ".join(map(str, line)) + "\n")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
