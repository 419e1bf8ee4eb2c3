"""PyTorch on a CUDA device: `make gpu`. Models, gradients and random numbers are the device's own."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import KVPS
from helpers.digits_job import run_workers
from helpers.paths import TESTS

import kvps
from kvps.store import Store

torch = pytest.importorskip("torch")
from helpers.ddp import batch, net  # noqa: E402

import kvps.torch  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ROUNDS, WORKERS = 8, 2
CNN = """
import pathlib, sys
import torch
from helpers.noisy_digits import NoisyDigits, cnn
from same_bits.job import sha256_of
import kvps, kvps.torch

torch.use_deterministic_algorithms(True)
device = torch.device("cuda")
with kvps.from_env() as worker:
    model = cnn().to(device)
    settings = {"samples": 1438, "batch_size": 96, "epochs": 4, "units_per_round": 6}
    job = worker.create_job(kvps.torch.parameters(model), optimizer=kvps.SGD(lr=0.5, momentum=0.5), **settings)
    with kvps.torch.join(job, model, worker.id) as session:
        for x, y in session.batches(NoisyDigits(), num_workers=int(sys.argv[1])):
            torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            session.step()
    assert job.await_finished()
    by = {c.worker for commit in job.log() for c in commit.plan.contributions}
    pathlib.Path("ended").write_text(f"{len(by)} {sha256_of(job.snapshot()[1])}")
"""


@pytest.fixture(scope="module", autouse=True)
def cuda() -> None:
    """Multiplications are in full float32, so that sums in another order differ by rounding alone."""
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    torch.set_float32_matmul_precision("highest")


def on_device(number: int) -> tuple[Any, Any]:
    x, y = batch(0, number)
    return x.cuda(), y.cuda()


# -- loops ---------------------------------------------------------------------------------------------------------


def plain(model: Any, optimizer: Any) -> None:
    for number in range(ROUNDS):
        x, y = on_device(number)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def scaled(model: Any, optimizer: Any) -> None:
    """Autocast to float16, whose first gradients overflow: the scaler leaves these steps out."""
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    for number in range(4 * ROUNDS):
        x, y = on_device(number)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**40


@pytest.mark.parametrize("transport", ["redis", "shm"])
@pytest.mark.parametrize("loop", [plain, scaled])
def test_a_loop_ends_as_with_its_own_optimizer(store: Store, loop: Callable[[Any, Any], None], transport: str) -> None:
    """The optimizer is the device's in one, and kvps's on the CPU in the other."""
    models = [net().cuda() for _ in range(2)]
    adam = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    loop(models[0], adam[0])
    rule = kvps.torch.optimizer(models[1], adam[1])
    start = kvps.torch.parameters(models[1])
    job = store.create_job("job", start, optimizer=rule, transport=transport, worker_timeout_ms=60_000)

    def train() -> None:
        with kvps.torch.Optimizer(adam[1], models[1], job=job) as optimizer:
            loop(models[1], optimizer)

    run_workers(job, train)
    for (name, mine), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert mine.is_cuda
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_two_workers_count_as_one_of_their_batches_together(store: Store) -> None:
    """The oracle adds up both gradients on the device, and steps with PyTorch's own SGD."""
    start = net().cuda()
    sgd = torch.optim.SGD(start.parameters(), lr=0.1, momentum=0.9)
    job = store.create_job(
        "job",
        kvps.torch.parameters(start),
        optimizer=kvps.torch.optimizer(start, sgd),
        workers=WORKERS,
        worker_timeout_ms=60_000,
    )

    def train(rank: int) -> None:
        model = copy.deepcopy(start)
        with kvps.torch.join(job, model, f"w{rank}") as worker:
            while worker.session.clock < ROUNDS:
                worker.pull()
                x, y = on_device(2 * worker.session.clock + worker.session.rank)
                torch.nn.functional.cross_entropy(model(x), y).backward()
                worker.step()

    run_workers(job, *(partial(train, rank) for rank in range(WORKERS)))
    ended = job.snapshot()[1]
    for round_ in range(ROUNDS):
        sgd.zero_grad()
        for rank in range(WORKERS):
            x, y = on_device(2 * round_ + rank)
            (torch.nn.functional.cross_entropy(start(x), y) / WORKERS).backward()
        sgd.step()
    for name, parameter in start.named_parameters():
        np.testing.assert_allclose(ended[name], parameter.detach().cpu().numpy(), rtol=0, atol=1e-4, err_msg=name)


def test_a_cnn_with_dropout_ends_with_the_same_bits_whoever_trains(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The dropout's random numbers are the device's: `batches` seeds them for each unit."""
    (tmp_path / "train.py").write_text(CNN)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    ended = {}
    for copies, loaders in ((1, 0), (2, 0), (3, 2), (1, 2)):
        command = [*KVPS, "run", "-w", str(copies), "--", sys.executable, "train.py", str(loaders)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        by, ended[copies, loaders] = (tmp_path / "ended").read_text().split()
        assert int(by) == copies
    assert len(set(ended.values())) == 1, ended
