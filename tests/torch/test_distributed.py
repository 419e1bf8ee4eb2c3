"""kvps.torch.Optimizer: the loops that PyTorch users have, with its step in the place of their optimizer's."""

from __future__ import annotations

import copy
import io
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arrays import assert_close, assert_same_bits
from helpers.commands import KVPS, run
from helpers.ddp import OPTIMIZERS, ROUNDS, batch, loss_of, net, weights_of
from helpers.digits_job import in_thread, run_workers
from helpers.harness import aggregating, check_chain, next_lr
from helpers.paths import TESTS
from helpers.torch_process import TorchPopen
from torch import nn
from torch.optim import lr_scheduler

import kvps
import kvps.torch
from kvps import launch
from kvps.store import Store, fresh_id

Make = Callable[[Any], torch.optim.Optimizer]
Loop = Callable[[torch.optim.Optimizer, nn.Module, Callable[[int], tuple[torch.Tensor, torch.Tensor]]], None]


def create(store: Store, make: Make = OPTIMIZERS["adam"], **settings: Any) -> kvps.Job:
    model = net()
    rule = kvps.torch.optimizer(model, make(model.parameters()))
    settings = {"workers": 2, "transport": "redis", "worker_timeout_ms": 60_000} | settings
    return store.create_job("job", kvps.torch.parameters(model), optimizer=rule, **settings)


@pytest.fixture
def alone(store: Store) -> Iterator[Callable[..., kvps.torch.Optimizer]]:
    """Makes the optimizer of a worker that is the only one of its job; `settings` are the job's."""
    with ExitStack() as stack:

        def make(
            optimizer: torch.optim.Optimizer,
            model: nn.Module,
            scheduler: Any = None,
            inner: Any = None,
            **settings: Any,
        ) -> kvps.torch.Optimizer:
            rule = kvps.torch.optimizer(model, optimizer, scheduler)
            start = kvps.torch.parameters(model)
            job = store.create_job("job", start, optimizer=rule, workers=1, transport="redis", **settings)
            stack.enter_context(aggregating(job))
            return stack.enter_context(kvps.torch.Optimizer(optimizer, model, scheduler, job, inner))

        yield make


def backward(model: nn.Module, rank: int, round_: int) -> torch.Tensor:
    loss = loss_of(model, rank, round_)
    loss.backward()
    return loss


# -- the loops of PyTorch ------------------------------------------------------------------------------------------


def test_two_workers_end_as_the_mean_of_their_gradients_in_a_plain_loop(store: Store) -> None:
    """No weight is apart by more than the roundings of 20 steps: the aggregator rounds each product, and a sum."""
    job = create(store)

    def run(number: int, ends: dict[int, dict[str, np.ndarray]]) -> None:
        model = net()
        adam = OPTIMIZERS["adam"](model.parameters())
        with kvps.torch.Optimizer(adam, model, job=job, worker=f"w{number}") as optimizer:
            assert isinstance(optimizer, torch.optim.Optimizer)
            assert (optimizer.rank, optimizer.workers) == (number, 2)
            for round_ in range(ROUNDS):
                optimizer.zero_grad()
                backward(model, number, round_)
                optimizer.step()
            ends[number] = weights_of(model)  # those of the last version, without another call

    ends: dict[int, dict[str, np.ndarray]] = {}
    run_workers(job, partial(run, 0, ends), partial(run, 1, ends))
    assert check_chain(job) == ROUNDS
    assert_same_bits(ends[0], ends[1])

    models = [net(), net()]
    adam = OPTIMIZERS["adam"](models[0].parameters())
    for round_ in range(ROUNDS):
        for rank, model in enumerate(models):
            model.zero_grad()
            backward(model, rank, round_)
        for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            mine.grad = (mine.grad + other.grad) / 2
        adam.step()
        with torch.no_grad():
            for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                other.copy_(mine)
    assert_close(ends[0], weights_of(models[0]))


def plain(optimizer: torch.optim.Optimizer, model: nn.Module, number: int) -> None:
    optimizer.zero_grad()
    backward(model, 0, number)
    optimizer.step()


def late_zero_grad(optimizer: torch.optim.Optimizer, model: nn.Module, number: int) -> None:
    """As Lightning has it."""
    loss = loss_of(model, 0, number)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def with_closure(optimizer: torch.optim.Optimizer, model: nn.Module, number: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(model, 0, number)

    with torch.no_grad():  # a closure has gradients all the same
        assert isinstance(optimizer.step(closure), torch.Tensor)


def accumulated(optimizer: torch.optim.Optimizer, model: nn.Module, number: int) -> None:
    for part in range(2):
        (loss_of(model, part, number) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def never_cleared(optimizer: torch.optim.Optimizer, model: nn.Module, number: int) -> None:
    """Gradients of earlier steps stay, as PyTorch leaves them."""
    backward(model, 0, number)
    optimizer.step()


def scaled(optimizer: torch.optim.Optimizer, model: nn.Module, number: int) -> None:
    """The first step of each scaler is left out, because its gradients are infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(1e3 * loss_of(model, 0, number)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(2.0**8)


@pytest.mark.parametrize("loop", [plain, late_zero_grad, with_closure, accumulated, never_cleared, scaled])
def test_a_loop_ends_as_with_its_own_optimizer(alone: Any, loop: Any) -> None:
    ends = []
    for make in (alone, lambda optimizer, _: optimizer):
        model = net()
        optimizer = make(OPTIMIZERS["adam"](model.parameters()), model)
        for number in range(5):
            loop(optimizer, model, number)
        ends.append(weights_of(model))
    assert_close(*ends)


def test_batches_are_units_of_the_job(alone: Any) -> None:
    x, y = batch(0, 0)
    dataset, model = torch.utils.data.TensorDataset(x, y), net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = alone(sgd, model, samples=16, batch_size=4, epochs=2, units_per_round=2)
    for images, labels in optimizer.worker.batches(dataset):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step(loss=loss)
    assert optimizer.steps == 8
    assert kvps.torch.load(optimizer.job, model) == 4


# -- learning rates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_schedule_is_the_jobs_and_is_shown_in_the_groups(alone: Any, kind: Any) -> None:
    """The loop steps the scheduler as before, also one that computes each rate from the last."""
    ends, rates = [], []
    for make in (alone, lambda optimizer, *_: optimizer):
        model = net()
        groups = [{"params": [model[0].weight]}, {"params": [*model[1:].parameters()], "lr": 0.02}]
        of_torch = kind(groups, lr=0.01)
        scheduler = lr_scheduler.StepLR(of_torch, step_size=2, gamma=0.5)
        optimizer = make(of_torch, model, scheduler)
        seen = []
        for number in range(5):
            plain(optimizer, model, number)
            seen.append([group["lr"] for group in optimizer.param_groups])
            scheduler.step()
            seen.append([*scheduler.get_last_lr()])
        rates.append(seen)
        ends.append(weights_of(model))
    assert rates[0] == rates[1]
    assert_close(*ends)


def test_a_scheduler_around_it_sets_the_jobs_rate(store: Store) -> None:
    """That of rank 0 does, in BSP with the version that its next gradient is for."""
    job = create(store, lambda params: torch.optim.SGD(params, lr=0.1))
    rates: dict[int, list[float]] = {}

    def run(number: int) -> None:
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with kvps.torch.Optimizer(sgd, model, job=job, worker=f"w{number}") as optimizer:
            scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
            rates[number] = []
            for round_ in range(4):
                optimizer.zero_grad()
                backward(model, number, round_)
                optimizer.step()
                rates[number].append(optimizer.param_groups[0]["lr"])
                if round_ < 2:
                    scheduler.step()
                elif optimizer.rank == 0:
                    plateau.step(1.0)  # the second one is no better

    run_workers(job, partial(run, 0), partial(run, 1))
    assert [commit.plan.lr for commit in job.log()] == [None, 0.05, 0.1 / 3, 0.1 / 3]
    assert rates[0] == [0.1, 0.05, 0.1 / 3, 0.1 / 3]
    assert next_lr(job) == 0.1 / 3


def test_groups_keep_the_proportion_of_their_rates(alone: Any) -> None:
    model = net()
    groups = [{"params": [model[0].weight]}, {"params": [*model[1:].parameters()], "lr": 0.02}]
    optimizer = alone(torch.optim.SGD(groups, lr=0.01), model)
    for group in optimizer.param_groups:
        group["lr"] /= 10
    plain(optimizer, model, 0)
    assert next_lr(optimizer.job) == 0.001
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.002]
    optimizer.param_groups[1]["lr"] = 0.01
    with pytest.raises(kvps.InvalidSetting, match=r"were set to 0.001, 0.01, and a job keeps their proportion"):
        plain(optimizer, model, 1)
    assert optimizer.steps == 1
    optimizer.param_groups[1]["momentum"] = 0.5
    with pytest.raises(kvps.InvalidSetting, match=r"momentum was set to 0.5, and a job changes its learning"):
        plain(optimizer, model, 1)
    optimizer.param_groups[1]["momentum"] = 0
    optimizer.job.set_lr(0.5)  # as somebody else may
    optimizer.param_groups[1]["lr"] = 0.002
    plain(optimizer, model, 1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.0]


# -- what is refused, saved and left -------------------------------------------------------------------------------


def test_what_does_not_fit_the_job_is_refused(store: Store) -> None:
    job, model = create(store), net()
    adam = OPTIMIZERS["adam"](model.parameters())
    with pytest.raises(kvps.InvalidSetting, match="job 'job' has its settings already: leave out staleness, buffers"):
        kvps.torch.Optimizer(adam, model, job=job, staleness=1, buffers="rank0")
    with pytest.raises(kvps.InvalidSetting, match="and this optimizer is sgd"):
        kvps.torch.Optimizer(OPTIMIZERS["sgd"](model.parameters()), model, job=job)
    grouped = OPTIMIZERS["adam"](model.parameters()), OPTIMIZERS["adam"](model.parameters())
    for factor, optimizer in enumerate(grouped, 2):
        group = optimizer.param_groups[0]
        last = group["params"].pop()
        optimizer.add_param_group({"params": [last], "weight_decay": factor / 10})
    rule = kvps.torch.optimizer(model, grouped[0])
    of_groups = store.create_job("groups", kvps.torch.parameters(model), optimizer=rule, workers=2)
    with pytest.raises(kvps.InvalidSetting, match=r"and this optimizer is adam\(.*\) with other groups: give"):
        kvps.torch.Optimizer(grouped[1], model, job=of_groups)
    with pytest.raises(kvps.InvalidSetting, match="leave out optimizer=: it comes first"):
        kvps.torch.Optimizer(adam, model, optimizer=kvps.SGD(lr=0.1))
    assert job.state().clock == {}
    with aggregating(job), kvps.torch.Optimizer(adam, model, job=job) as optimizer:
        with pytest.raises(kvps.InvalidSetting, match="a job trains the parameters that it began with"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(kvps.UsageError, match="cannot be copied or pickled"):
            copy.deepcopy(optimizer)
        weight = model[0].weight
        assert (len(optimizer.state), optimizer.state.get(weight)) == (0, None)
        for touch in (
            optimizer.state.clear,
            partial(optimizer.state.pop, weight, None),
            lambda: optimizer.state[weight]["exp_avg"].zero_(),
            partial(optimizer.state.__setitem__, weight, {}),
        ):
            with pytest.raises(kvps.UsageError, match="state of the optimizer is the job's"):
                touch()
        with pytest.raises(kvps.WrongOrder, match="no parameter has a gradient"):
            optimizer.step()
        for loss in (torch.ones(()), 0.5):
            with pytest.raises(kvps.UsageError, match=r"give a loss as step\(loss=loss\)"):
                optimizer.step(loss)


def test_under_kvps_run_an_optimizer_that_is_refused_is_one_line(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name, value in (launch.of_copy(0, 1, "job", fresh_id(), {}) | {"KVPS_REDIS_URL": store.url}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kvps.InvalidSetting) as caught:
        kvps.torch.Optimizer(torch.optim.Rprop(net().parameters()), net())
    sys.excepthook(caught.type, caught.value, caught.tb)
    said = capsys.readouterr().err
    assert said.startswith("kvps: error: kvps has no Rprop")
    assert said.count("\n") == 1, said


def test_momentum_and_groups_that_the_script_replaces_are_refused(alone: Any) -> None:
    model = net()
    groups = [{"params": [model[0].weight]}, {"params": [*model[1:].parameters()]}]
    optimizer = alone(torch.optim.Adam(groups, lr=0.01), model)
    plain(optimizer, model, 0)
    state = optimizer.state
    optimizer.state = defaultdict(dict)
    with pytest.raises(kvps.UsageError, match="state of the optimizer is the job's"):
        plain(optimizer, model, 1)
    optimizer.state = state
    frozen = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(kvps.UsageError, match=r"param_groups .* requires_grad_\(False\)"):
        plain(optimizer, model, 1)
    optimizer.param_groups[0]["params"].append(frozen)
    group = optimizer.param_groups.pop()
    with pytest.raises(kvps.UsageError, match="param_groups"):
        plain(optimizer, model, 1)
    optimizer.param_groups.append(group)
    plain(optimizer, model, 1)
    assert optimizer.steps == 2
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state.get(frozen) is None
    plain(optimizer, model, 2)


def test_a_state_goes_on_where_the_job_is(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    job = create(store, workers=1)
    with aggregating(job):
        model = net()
        optimizer = kvps.torch.Optimizer(OPTIMIZERS["adam"](model.parameters()), model, job=job)
        for number in range(3):
            plain(optimizer, model, number)
        optimizer.worker.state = {"epoch": 1}  # it would travel with the next push
        saved = optimizer.state_dict()
        own = {"job": "job", "id": job.id, "clock": 3, "steps": 3, "step": 3, "state": {"epoch": 1}, "rates": [0.01]}
        assert saved["kvps"] == own
        torch.save(saved, file := io.BytesIO())
        file.seek(0)
        saved = torch.load(file, weights_only=True)  # as libraries read it
        at_3 = weights_of(model)
        optimizer.close(finished=False)
        optimizer.close()

        again = net()
        adam = OPTIMIZERS["adam"](again.parameters())
        resumed = kvps.torch.Optimizer(adam, again, job=job)
        with pytest.raises(kvps.InvalidSetting, match=r"not the state of a kvps.torch.Optimizer"):
            resumed.load_state_dict(adam.state_dict())
        with torch.no_grad():
            again[0].weight.zero_()  # as a library that loads its own checkpoint before
        resumed.load_state_dict(saved)
        assert_same_bits(weights_of(again), at_3)
        assert (resumed.steps, resumed.worker.session.clock, resumed.worker.state) == (3, 3, {"epoch": 1})
        plain(resumed, again, 3)
        assert resumed.steps == 4
        assert not caplog.records
        for other in ({"clock": 9}, {"job": "another", "id": "another"}):
            with pytest.raises(kvps.InvalidSetting, match=r"is of job '(job' at clock 9|another' at clock 3), .* 4:"):
                resumed.load_state_dict(saved | {"kvps": saved["kvps"] | other})
        resumed.close()
        assert job.state().finished(job.config)
        with pytest.raises(kvps.WrongOrder, match="is closed"):
            plain(resumed, again, 4)


@pytest.mark.parametrize("loop", [plain, with_closure])
@pytest.mark.parametrize("local_steps", [1, 2])
def test_a_loop_that_goes_back_to_its_state_does_no_step_twice(
    alone: Any, caplog: pytest.LogCaptureFixture, loop: Loop, local_steps: int
) -> None:
    """As libraries resume: from their own checkpoint, which is older than the job, and perhaps of the job from whose
    checkpoint this one was restored."""

    def inner(model: nn.Module) -> torch.optim.Optimizer | None:
        return torch.optim.SGD(model.parameters(), lr=0.1) if local_steps > 1 else None

    model = net()
    sgd = OPTIMIZERS["sgd"](model.parameters())
    optimizer = alone(sgd, model, inner=inner(model), local_steps=local_steps)
    for number in range(8):
        if number == 3:
            saved = copy.deepcopy(optimizer.state_dict())
        loop(optimizer, model, number)
    end, clock = weights_of(model), optimizer.worker.session.clock
    optimizer.close(finished=False)
    model = net()
    sgd = OPTIMIZERS["sgd"](model.parameters())
    optimizer = kvps.torch.Optimizer(sgd, model, job=optimizer.job, inner=inner(model))
    saved["kvps"]["id"] = "that of the job before"
    optimizer.load_state_dict(saved)
    assert "are passed over, for it has them" in caplog.text
    with torch.no_grad():
        model[0].weight.zero_()  # as a library that loads its own checkpoint behind it
    for number in range(3, 8):
        assert optimizer.steps == number
        if number == 5:  # it saves, and is stopped again, before the loop has come to where the job is
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)  # as a scheduler does: the job had these rates then
        loop(optimizer, model, number)
    assert (optimizer.steps, optimizer.worker.session.clock, next_lr(optimizer.job)) == (8, clock, 0.05)
    assert_same_bits(weights_of(model), end)
    assert optimizer.param_groups[0]["lr"] == 0.05, "from here on the job's is shown"
    optimizer.param_groups[0]["lr"] = 0.1 / 8
    loop(optimizer, model, 8)
    assert (optimizer.steps, next_lr(optimizer.job)) == (9, 0.1 / 8)


@pytest.mark.parametrize("end", ["finished", "fails", "stop", "suspend"])
def test_finish_waits_for_the_others_and_fills_the_model_with_the_last_version(
    store: Store, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """With staleness the first worker ends with weights that lack what the other one does later. A stop ends the loop
    of that one before its `finish`."""
    timeout = 5_000 if end == "fails" else 60_000
    job = create(store, lambda params: torch.optim.SGD(params, lr=0.1), staleness=8, worker_timeout_ms=timeout)
    goes_on = threading.Event()
    models = [net(), net()]

    def run(number: int) -> None:
        sgd = torch.optim.SGD(models[number].parameters(), lr=0.1)
        with kvps.torch.Optimizer(sgd, models[number], job=job, worker=f"w{number}") as optimizer:
            for round_ in range(4):
                assert not number or round_ == 0 or goes_on.wait(60)
                plain(optimizer, models[number], round_)
            if number and end == "fails":
                raise ValueError("as a script does")
            if not number:
                with pytest.raises(kvps.WrongOrder, match="worker 'w0' has not left, and would wait for itself: leave"):
                    optimizer.job.await_finished()
                if end in ("stop", "suspend"):
                    getattr(job, end)()
                goes_on.set()
            assert optimizer.finish() == job.state().version
            with pytest.raises(kvps.WrongOrder, match="has left its job already: call finish"):
                optimizer.finish()

    def ended_by(error: type[BaseException], number: int) -> None:
        with pytest.raises(error):
            run(number)

    ends: dict[str, list[Callable[[int], None]]] = {
        "fails": [run, partial(ended_by, ValueError)],
        "suspend": [partial(ended_by, kvps.JobSuspended)] * 2,
    }
    with aggregating(job):
        workers = [in_thread(partial(call, number)) for number, call in enumerate(ends.get(end, [run, run]))]
        for worker in workers:
            worker.result()
    assert job.state().clock == {"w0": 4, "w1": 4}
    if end != "suspend":
        assert_same_bits(weights_of(models[0]), job.snapshot()[1])
    if end in ("finished", "stop"):
        assert_same_bits(weights_of(models[1]), job.snapshot()[1])
    assert ("have left with steps undone: the model has version" in caplog.text) == (end == "fails")


def test_alone_it_makes_a_job_and_ends_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_REDIS_URL", store.url)
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with kvps.torch.Optimizer(sgd, model, clip_norm=1.0, staleness=1, buffers="rank0", worker="me") as optimizer:
        plain(optimizer, model, 0)
        job = store.job(optimizer.job.name)
        assert (job.config.optimizer, job.config.staleness) == (kvps.SGD(lr=0.1, clip_norm=1.0), 1)
        assert ([*job.state().clock], job.layout.buffer_kind) == (["me"], "rank0")
        assert optimizer.finish() == 1
    assert store.jobs() == []


SCRIPT = """
import os, sys, torch, kvps, kvps.torch
from helpers.ddp import loss_of, net
scripts = []
for name in ("finished", "failed"):  # one Python imports PyTorch for both
    if not (script := os.fork()):
        break
    scripts.append(script)
if not script:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job = kvps.connect(os.environ["KVPS_REDIS_URL"]).job("job")
    optimizer = kvps.torch.Optimizer(sgd, model, job=job, worker=name)
    if os.fork() == 0:
        sys.exit()
    os.wait()
    loss_of(model, 0, 0).backward()
    optimizer.step()
    if name == "failed":
        raise KeyboardInterrupt
else:
    print([os.waitstatus_to_exitcode(os.waitpid(script, 0)[1]) for script in scripts])
"""


@pytest.mark.slow
def test_the_end_of_the_interpreter_leaves(store: Store) -> None:
    """Finished, unless by an exception; and a fork of it leaves nothing."""
    job = create(store, lambda params: torch.optim.SGD(params, lr=0.1))
    with aggregating(job):
        environment = os.environ | {"KVPS_REDIS_URL": store.url, "PYTHONPATH": str(TESTS)}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
        assert done.stdout == f"{[0, -signal.SIGINT]}\n", done.stderr
        assert "KeyboardInterrupt" in done.stderr
        members = job.state().members
        left = {name: (member.state, member.evicted, member.finished) for name, member in members.items()}
        assert left == {"finished": ("gone", False, True), "failed": ("gone", False, False)}
        assert job.state().clock == {"finished": 1, "failed": 1}


RANK_FIRST = """
import os, signal, sys
from pathlib import Path
import torch, kvps, kvps.torch
from helpers.ddp import loss_of, net

with kvps.from_env() as copy:
    rank, workers = copy.rank, copy.workers
mine, model = range(rank, 12, workers), net()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.1, len(mine))
print("knows", rank, workers, len(mine))

@kvps.torch.evaluates(model)
def evaluate(model, job):
    return {"norm": sum(float(p.norm()) for p in model.parameters())}

with kvps.torch.Optimizer(sgd, model, schedule) as optimizer:
    assert (optimizer.rank, optimizer.workers) == (rank, workers)
    for number in mine[optimizer.worker.session.clock:]:
        optimizer.zero_grad()
        loss_of(model, 0, number).backward()
        optimizer.step()
        schedule.step()
        killed = Path(f"killed-{rank}")
        if workers > 1 and optimizer.steps == 2 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    print("done", rank)
"""


@pytest.mark.slow
def test_rank_is_known_before_the_optimizer_and_so_is_the_schedule(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In copies, also when they come back, in the evaluator, and alone."""
    (tmp_path / "train.py").write_text(RANK_FIRST)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    done = run([*KVPS, "run", "-w", "2", "--eval-every", "2", "--", sys.executable, "train.py"], True, TorchPopen)
    said = sorted(line.partition(": ")[2] for line in done.stdout.splitlines() if "knows" in line or "done" in line)
    assert said == ["done 0", "done 1", *["knows 0 2 6"] * 2, *["knows 1 2 6"] * 2, "knows 2 2 5"], done.stderr
    alone = run([sys.executable, "train.py"], True, TorchPopen)
    assert alone.stdout.splitlines() == ["knows 0 1 12", "done 0"]
