"""A parameter without a gradient: as in PyTorch's optimizers, and as in DistributedDataParallel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arrays import assert_close, assert_same_bits
from helpers.ddp import OF_EXPERTS, ROUNDS, Experts, batch, loss_of_expert, weights_of
from helpers.digits_job import proved, run_workers
from helpers.harness import aggregating, await_version, check_chain
from helpers.torch_process import TorchPopen
from kvps_cli.prove.verify import proof_of
from torch import nn

import kvps
import kvps.torch
from kvps.history.checkpoint import Checkpoint
from kvps.store import Store

Weights = dict[str, np.ndarray]
Make = Callable[[Any], torch.optim.Optimizer]
OF_PYTORCH: dict[str, Make] = OF_EXPERTS | {
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1),
    "dampened": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.3),
}


def created(store: Store, name: str, make: Make, workers: int = 1, **settings: Any) -> kvps.Job:
    model = Experts()
    optimizer = kvps.torch.optimizer(model, make(model.parameters()), clip_norm=settings.pop("clip_norm", 0.0))
    settings = {"worker_timeout_ms": 60_000, "transport": "redis"} | settings
    return store.create_job(name, kvps.torch.parameters(model), optimizer=optimizer, workers=workers, **settings)


def loss_of(model: Experts, round_: int) -> torch.Tensor:
    """The loss of a round: experts come and go, and the trunk is frozen for some rounds."""
    model.trunk.requires_grad_(round_ not in range(8, 12))
    x, y = batch(0, round_)
    return nn.functional.cross_entropy(model(x, (round_ // 2) % 3), y)


def alone(make: Make, clip_norm: float = 0.0) -> Weights:
    model = Experts()
    optimizer = make(model.parameters())
    for round_ in range(ROUNDS):
        optimizer.zero_grad()
        loss_of(model, round_).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return weights_of(model)


def train(job: kvps.Job, **how: Any) -> None:
    model = Experts()
    with kvps.torch.join(job, model, "w0", **how) as worker:
        for round_ in range(ROUNDS):
            worker.pull()
            loss_of(model, round_).backward()
            worker.step()
    job.await_finished()


@pytest.mark.parametrize("name", OF_PYTORCH)
def test_what_has_no_gradient_stays_as_in_pytorch(store: Store, tmp_path: Path, name: str) -> None:
    job = created(store, "job", OF_PYTORCH[name], shards=3)
    with aggregating(job, record=tmp_path):
        train(job)
    assert_close(job.snapshot()[1], alone(OF_PYTORCH[name]))
    check_chain(job)
    assert proved(job, tmp_path).replayed == ROUNDS


def test_clipped_overlapped_and_over_shared_memory(store: Store) -> None:
    job = created(store, "job", OF_PYTORCH["adamw"], clip_norm=0.5, transport="shm")
    with aggregating(job):
        train(job, overlap=True)
    assert_close(job.snapshot()[1], alone(OF_PYTORCH["adamw"], clip_norm=0.5))


def test_a_job_goes_on_from_a_checkpoint_with_its_counts_of_steps(store: Store, tmp_path: Path) -> None:
    whole, half = (created(store, name, OF_PYTORCH["adamw"]) for name in ("whole", "half"))
    with aggregating(whole):
        train(whole)
    model = Experts()
    with aggregating(half):
        worker = kvps.torch.join(half, model, "w0")
        for round_ in range(9):
            worker.pull()
            loss_of(model, round_).backward()
            worker.step()
        worker.leave(finished=False)
        await_version(half, 9)
    half.checkpoint().write(tmp_path / "half")
    saved = Checkpoint.load(tmp_path / "half")
    assert saved.skipped
    again = store.restore_job(saved, "again", shards=2)
    with kvps.torch.join(again, model, "w0") as worker:
        for first, last in ((9, 14), (14, ROUNDS)):
            with aggregating(again, record=tmp_path):  # the second one reads the counts of the first
                for round_ in range(first, last):
                    worker.pull()
                    loss_of(model, round_).backward()
                    worker.step()
                await_version(again, last)
    assert_same_bits(again.snapshot()[1], whole.snapshot()[1])
    _, proof = proof_of(again, tmp_path, start=saved)
    assert (proof.differs, proof.replayed) == ("", ROUNDS - 9)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts_end_as_in_distributed_data_parallel(store: Store, of_ddp: dict[str, Weights], name: str) -> None:
    """What one rank uses has the mean with zeros, and what none uses stays."""
    job = created(store, "job", OF_EXPERTS[name], workers=2)

    def run(rank: int) -> None:
        model = Experts()
        with kvps.torch.join(job, model, f"w{rank}") as worker:
            for round_ in range(ROUNDS):
                worker.pull()
                loss_of_expert(model, worker.session.rank, round_).backward()
                worker.step()

    run_workers(job, partial(run, 0), partial(run, 1))
    assert_close(job.snapshot()[1], of_ddp[f"experts-{name}"])


GROUP = """
import os, sys, torch.distributed as dist
import kvps, kvps.torch
from helpers.ddp import ROUNDS, Experts, loss_of_expert

url, meet, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", "file://" + meet, rank=rank, world_size=2)
model = Experts()
with kvps.torch.join(kvps.connect(url).job("job"), model, "w0", group=dist.group.WORLD) as worker:
    for round_ in range(ROUNDS):
        worker.pull()
        loss_of_expert(model, rank, round_).backward()
        worker.step()
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_group_lacks_what_all_its_members_lack(
    store: Store, server_url: str, of_ddp: dict[str, Weights], tmp_path: Path
) -> None:
    job = created(store, "job", OF_EXPERTS["adamw"])
    command = [sys.executable, "-c", GROUP, server_url, str(tmp_path / "meet")]
    with aggregating(job):
        members = [TorchPopen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
        try:
            assert [member.communicate(timeout=100)[0] for member in members] == ["done\n", "done\n"]
        finally:
            for member in members:
                member.kill()
                member.communicate()
        job.await_finished()
    assert_close(job.snapshot()[1], of_ddp["experts-adamw"])


def test_with_zeros_momentum_and_decay_go_on(store: Store) -> None:
    """What the setting is for: in the job of the other setting the expert stays."""
    for how in ("zeros", "skip"):
        job, model = created(store, how, OF_EXPERTS["adamw"], missing=how), Experts()
        with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
            for _ in range(2):
                worker.pull()
                model(batch(0, 0)[0], 0).sum().backward()
                worker.step()
            worker.pull()
        moved = not torch.equal(model.experts[1].weight, Experts().experts[1].weight)
        assert moved == (how == "zeros"), how


@pytest.mark.parametrize("fragments", [0, 2])
def test_local_steps_leave_alone_what_has_no_gradient_in_any_of_them(store: Store, fragments: int) -> None:
    """Expert 0 trains until it is frozen, expert 1 in one step of eight, expert 2 never. An outer momentum would move
    them on."""
    outer = kvps.SGD(lr=0.7, momentum=0.9, nesterov=True)
    params = kvps.torch.parameters(Experts())
    job = store.create_job("job", params, optimizer=outer, local_steps=4, fragments=fragments)
    model, frozen = Experts(), dict[str, np.ndarray]()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with aggregating(job), kvps.torch.join(job, model, "w0", inner=inner) as worker:
        for step in range(24):
            worker.pull()
            if step == 12:
                model.experts[0].requires_grad_(False)
                frozen = {"w": job.snapshot()[1]["experts.0.weight"]}
            model(batch(0, step)[0], 1 if step % 8 == 7 else 0).sum().backward()
            worker.step()
        worker.leave()
        job.await_finished()
    after, before = job.snapshot()[1], weights_of(Experts())
    if not fragments:  # else its last local steps are pushed after it was frozen
        assert_same_bits({"w": after["experts.0.weight"]}, frozen)
    assert (after["experts.1.weight"] != before["experts.1.weight"]).any()
    assert_same_bits({"w": after["experts.2.weight"]}, {"w": before["experts.2.weight"]})
