"""A process group as one worker: half the bytes, the same weights, and nothing lost or counted twice by who dies."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import group_member
from helpers.arrays import assert_same_bits
from helpers.commands import Started
from helpers.ddp import loss_of, net, weights_of
from helpers.digits_job import in_thread, proved, run_workers
from helpers.group_member import POINTS
from helpers.harness import aggregating, await_version, check_chain
from helpers.torch_process import TorchPopen
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import kvps
import kvps.torch
from kvps.store import Store

ROUNDS = 6
Weights = dict[str, np.ndarray]


def _create(store: Store, name: str, buffers: str = "own", **settings: Any) -> kvps.Job:
    model = net()
    optimizer = kvps.torch.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    settings = {"workers": 2, "transport": "redis", "worker_timeout_ms": 60_000} | settings
    return store.create_job(name, kvps.torch.parameters(model, buffers), optimizer=optimizer, **settings)


@contextmanager
def _members(job: kvps.Job, url: str, folder: Path) -> Iterator[Callable[..., Started]]:
    """Yield a function that starts a member; all have ended after the block."""
    common = {"url": url, "job": job.name, "folder": str(folder), "rounds": ROUNDS, "size": 2}
    with ExitStack() as stack:

        def start(**own: Any) -> Started:
            member = Started([sys.executable, group_member.__file__, json.dumps(common | own)], popen=TorchPopen)
            stack.callback(member.end, signal.SIGKILL)
            return member

        yield start


def _in_groups(job: kvps.Job, url: str, folder: Path, size: int) -> Weights:
    """The weights after training with groups of `size`; the batches of four members in all."""
    with _members(job, url, folder) as start, aggregating(job, record=folder / "record"):
        for member in [start(worker=f"w{data // size}", data=data, rank=data % size, size=size) for data in range(4)]:
            member.output()
        job.await_finished()
    model = net()
    assert kvps.torch.load(job, model) == check_chain(job)
    return weights_of(model)


def _alone(job: kvps.Job, number: int) -> None:
    """A worker that pushes the mean of two gradients, which it has averaged itself."""
    model = net()
    with kvps.torch.join(job, model, f"w{number}") as worker:
        while worker.session.round < ROUNDS:
            worker.pull()
            ours, theirs = (_gradients(model, 2 * number + m, worker.session.round) for m in range(2))
            for parameter, one, other in zip(model.parameters(), ours, theirs, strict=True):
                parameter.grad = (one + other) / 2
            worker.step()


@pytest.fixture(scope="module")
def by_hand(server_url: str) -> Weights:
    """The weights if there are two such workers."""
    with kvps.connect(server_url) as store:
        job, model = _create(store, "by-hand"), net()
        run_workers(job, partial(_alone, job, 0), partial(_alone, job, 1))
        kvps.torch.load(job, model)
        return weights_of(model)


def _gradients(model: nn.Module, data: int, round_: int) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model, data, round_).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _pushed_bytes(folder: Path) -> int:
    """How many bytes of gradients the aggregator has received and recorded."""
    return sum(file.stat().st_size for file in folder.rglob("*.g"))


@pytest.mark.slow
def test_two_groups_of_two_push_half_the_bytes_and_end_as_averaged_by_hand(
    store: Store, server_url: str, tmp_path: Path, by_hand: Weights
) -> None:
    ends: dict[int, Weights] = {}
    for size, name in ((1, "single"), (2, "groups")):
        job = _create(store, name, workers=4 // size)
        (tmp_path / name).mkdir()
        ends[size] = _in_groups(job, server_url, tmp_path / name, size)
        contributions = [c for commit in job.log() for c in commit.plan.contributions]
        assert len(contributions) == 4 // size * ROUNDS
        assert job.state().clock == {f"w{number}": ROUNDS for number in range(4 // size)}
    assert 2 * _pushed_bytes(tmp_path / "groups") == _pushed_bytes(tmp_path / "single") > 0
    assert_same_bits(ends[2], by_hand)
    for name, array in ends[1].items():  # the mean of four, added up in another order
        np.testing.assert_allclose(ends[2][name], array, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["average", "rank0"])
def test_a_group_pushes_the_buffers_of_its_members(store: Store, server_url: str, tmp_path: Path, kind: str) -> None:
    """Their mean, or those of the leader, from what all of them have pulled."""
    job = _create(store, "job", kind, workers=1)
    with _members(job, server_url, tmp_path) as start, aggregating(job, record=tmp_path / "record"):
        for member in [start(worker="w0", data=data, rank=data) for data in range(2)]:
            member.output()
        job.await_finished()
    assert proved(job, tmp_path / "record").by == "recorded"
    by_hand = _create(store, "by-hand", kind, workers=1)
    with aggregating(by_hand), kvps.torch.join(by_hand, model := net(), "w0") as worker:
        while worker.session.round < ROUNDS:
            worker.pull()
            pulled, ends = {name: b.clone() for name, b in model.named_buffers()}, []
            for data in range(2):
                for name, buffer in pulled.items():
                    model.get_buffer(name).copy_(buffer)
                gradients = _gradients(model, data, worker.session.round)
                ends.append((gradients, {name: b.clone() for name, b in model.named_buffers()}))
            (ours, first), (theirs, second) = ends
            for parameter, one, other in zip(model.parameters(), ours, theirs, strict=True):
                parameter.grad = (one + other) / 2
            for name, buffer in model.named_buffers():
                buffer.copy_(first[name] if kind == "rank0" else (first[name] + second[name]) / 2)
            worker.step()
        await_version(by_hand, ROUNDS)
    assert_same_bits(job.snapshot()[1], by_hand.snapshot()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "die"), [*((0, point) for point in POINTS), (1, "computing"), (1, "sending its gradient"), (1, "told")]
)
def test_whoever_is_killed_whenever_each_acknowledged_contribution_counts_once(
    store: Store, server_url: str, tmp_path: Path, by_hand: Weights, rank: int, die: str
) -> None:
    """The survivor leads the new group, and computes the round again unless it was acknowledged."""
    job = _create(store, "job")
    with _members(job, server_url, tmp_path) as start, aggregating(job):
        other = in_thread(partial(_alone, job, 1))
        survivor = start(worker="w0", data=1 - rank, rank=1 - rank)
        start(worker="w0", data=rank, rank=rank, die=die, die_in=2).output(-signal.SIGKILL)
        instead = start(worker="w0", data=rank, rank=1, generation=1)
        said = [member.output() for member in (survivor, instead)]
        other.result()
        job.await_finished()
    assert "lost: a member of the process group is gone" in said[0]
    done = 3 if die in ("acknowledged, untold", "told") else 2
    assert f"w0 {rank} joined in round {done}" in said[1]
    assert job.state().clock == {"w0": ROUNDS, "w1": ROUNDS}
    model = net()
    assert kvps.torch.load(job, model) == check_chain(job) == ROUNDS
    assert_same_bits(weights_of(model), by_hand)


# -- errors: all members get them, and may go on ----------------------------------------------------------------------

TOLD = """
import json, os, sys, torch, torch.distributed as dist
import kvps, kvps.torch
from helpers.ddp import loss_of, net

url, meet, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", "file://" + meet, rank=rank, world_size=2)
group, model, job = dist.group.WORLD, net(), kvps.connect(url).job("job")

def says(call):
    try:
        return f"fine {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def pushed(spoil=None, loss=None):
    worker.pull()
    loss_of(model, rank, worker.session.round).backward()
    if spoil and rank == 1:
        spoil()
    return says(lambda: worker.step(loss))

first = next(iter(model.parameters()))
said = {}
said["disagree"] = says(lambda: kvps.torch.join(job, model, f"w{rank}", group=group))
said["long"] = says(lambda: kvps.torch.join(job, model, 5000 * "x", group=group))
with kvps.torch.join(job, model, group=group) as worker:
    said["id"] = [worker.session.worker, worker.session.rank, worker.session.clock]
    said["NaN"] = pushed(lambda: first.grad.fill_(float("nan")))
    said["NaN again"] = says(worker.step)
    said["loss"] = pushed(loss="low" if rank else 0.5)
    said["fine"] = pushed(loss=0.5)
    worker.pull()
    loss_of(model, rank, 1).backward()
    if rank == 1:
        for parameter in model.parameters():
            parameter.grad = None
        said["no backward"] = says(worker.step)
        loss_of(model, rank, 1).backward()
    said["then"] = says(worker.step)
    said["again"] = says(worker.step)
    said["alive"] = says(lambda: kvps.torch.join(job, model, "w0", group=group))
    if rank == 0:
        thief = job.join("w0", takeover=True)
    worker_pull = says(worker.pull)
    said["evicted"] = worker_pull
    if rank == 0:
        thief.leave()
said["left"] = [worker.session.round, worker.session.clock]
print(json.dumps(said), flush=True)
os._exit(0)
"""


LATE = """
import json, os, sys, torch.distributed as dist
import kvps, kvps.torch
from helpers.ddp import loss_of, net
from helpers.harness import await_version

url, meet, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", "file://" + meet, rank=rank, world_size=2)
job, model, said = kvps.connect(url).job("job"), net(), []
other = job.join("w1") if rank == 0 else None
with kvps.torch.join(job, model, "w0", group=dist.group.WORLD) as worker:
    for number in range(3):
        worker.pull()
        if other and number == 1:  # its round closes while the group computes
            weights = other.pull()
            other.push({name: 0 * array for name, array in weights.items()})
            await_version(job, 2)
        loss_of(model, rank, number).backward()
        try:
            worker.step()
        except kvps.ContributionLate as late:
            said.append("late")
        said.append([worker.session.round, worker.session.clock])
if other:
    other.leave()
print(json.dumps(said), flush=True)
os._exit(0)
"""


def _pair(code: str, url: str, folder: Path) -> list[Any]:
    """What two processes print in JSON that are the members 0 and 1 of a group."""
    command = [sys.executable, "-c", code, url, str(folder / "meet")]
    both = [Started([*command, str(rank)], popen=TorchPopen) for rank in range(2)]
    try:
        return [json.loads(process.output().splitlines()[-1]) for process in both]
    finally:
        for process in both:
            process.end(signal.SIGKILL)


@pytest.mark.slow
def test_a_round_that_was_closed_without_a_group_is_late_in_all_members(
    store: Store, server_url: str, tmp_path: Path
) -> None:
    job = _create(store, "job", quorum=1, late="drop")
    with aggregating(job):
        rounds = _pair(LATE, server_url, tmp_path)
        job.await_finished()
    assert rounds == [[[1, 1], "late", [2, 1], [3, 2]]] * 2
    assert job.state().clock == {"w0": 2, "w1": 1}


@pytest.mark.slow
def test_a_stop_ends_the_loops_of_all_members_with_one_round(store: Store, server_url: str, tmp_path: Path) -> None:
    job = _create(store, "job", workers=1)
    with _members(job, server_url, tmp_path) as start, aggregating(job):
        members = [start(worker="w0", data=data, rank=data, rounds=10**6) for data in range(2)]
        await_version(job, 3)
        run = job.stop("enough")
        for member in members:
            assert member.output().count("joined") == 1, "the with block ends, and the script with it"
        job.await_finished()
    assert job.state().clock == {"w0": run.round}
    assert check_chain(job) == run.round


@pytest.mark.slow
def test_an_error_of_one_member_or_of_redis_is_raised_in_all(store: Store, server_url: str, tmp_path: Path) -> None:
    job = _create(store, "job", workers=1, worker_timeout_ms=60_000)
    with aggregating(job):
        said = _pair(TOLD, server_url, tmp_path)
        job.await_finished()
    for each in said:
        assert each["disagree"].startswith("InvalidSetting: all members of a group join the same job under the same id")
        assert each["long"].startswith("InvalidName: worker name 'xxxx")
        assert each["id"] == ["w0", 0, 0]
        assert each["NaN"].startswith("NotFinite: ")
        assert each["NaN again"].startswith("NotFinite: ")
        assert each["fine"] == "fine 1"
        assert each["then"] == "fine 2"
        assert each["again"].startswith("WrongOrder: push() needs a pull()")
        assert each["alive"].startswith("WorkerAlive: ")
        assert each["evicted"].startswith("WorkerEvicted: ")
        assert each["left"] == [2, 2]
    assert said[1]["loss"].startswith("UsageError: the loss must be one number, not str")
    assert said[0]["loss"].startswith("UsageError: member 1 of the group: the loss must be one number, not str")
    assert said[1]["no backward"].startswith("WrongOrder: no parameter has a gradient")
    assert job.state().clock == {"w0": 2}


def test_what_is_no_group_is_refused_in_one_line(store: Store) -> None:
    job = _create(store, "job")
    with pytest.raises(kvps.InvalidSetting, match=r"^group must be a process group"):
        kvps.torch.join(job, net(), "w0", group="all")  # type: ignore[arg-type]
    with pytest.raises(kvps.InvalidSetting, match="leave it out"):
        kvps.torch.join(job, net(), "w0", group="all", overlap=True)  # type: ignore[arg-type]
    assert job.state().members == {}


def test_a_group_without_gloo_is_refused_in_one_line(store: Store) -> None:
    job = _create(store, "job")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(kvps.InvalidSetting, match=r"cpu:fake.*new_group\(backend='gloo'\)$"):
            kvps.torch.join(job, net(), "w0", group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert job.state().members == {}
