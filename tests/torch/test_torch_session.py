"""kvps.torch: a model of PyTorch, held against DistributedDataParallel and against plain loops."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arrays import assert_close, assert_same_bits
from helpers.ddp import OPTIMIZERS, ROUNDS, loss_of, net, weights_of
from helpers.digits_job import run_workers
from helpers.faults import full_server
from helpers.harness import aggregating, check_chain, newest_losses
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import kvps
import kvps.torch
from kvps.store import Store

Weights = dict[str, np.ndarray]
Round = Callable[[kvps.torch.TorchSession, nn.Module], None]


def one_round(worker: kvps.torch.TorchSession, model: nn.Module) -> None:
    worker.pull()
    loss = loss_of(model, worker.session.rank, worker.session.round)
    loss.backward()
    worker.step(loss)


def create(
    store: Store, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, name: str = "job", **settings: Any
) -> kvps.Job:
    optimizer = optimizer or OPTIMIZERS["sgd"](model.parameters())
    settings = {"workers": 2, "transport": "redis", "worker_timeout_ms": 60_000} | settings
    translated = kvps.torch.optimizer(model, optimizer)
    return store.create_job(name, kvps.torch.parameters(model), optimizer=translated, **settings)


def train(job: kvps.Job, models: list[nn.Module], rounds: int, round_: Round = one_round, **how: Any) -> Weights:
    """Each model on a thread as a worker of its own; the weights at the end."""

    def run(number: int, model: nn.Module) -> None:
        with kvps.torch.join(job, model, f"w{number}", **how) as worker:
            while worker.session.round < rounds:
                round_(worker, model)

    run_workers(job, *(partial(run, number, model) for number, model in enumerate(models)))
    assert kvps.torch.load(job, models[0]) == check_chain(job)
    return weights_of(models[0])


# -- the same as elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bsp_ends_as_distributed_data_parallel(store: Store, of_ddp: dict[str, Weights], name: str) -> None:
    model = net()
    job = create(store, model, OPTIMIZERS[name](model.parameters()), staleness=0)
    assert_close(train(job, [net(), net()], ROUNDS), of_ddp[name])


@pytest.mark.slow
def test_the_buffers_of_rank_0_end_as_in_distributed_data_parallel(store: Store, of_ddp: dict[str, Weights]) -> None:
    """With broadcast_buffers=True, its default, and within the rounding of the weights that they are computed with."""
    model = net()
    optimizer = kvps.torch.optimizer(model, OPTIMIZERS["sgd"](model.parameters()))
    start = kvps.torch.parameters(model, buffers="rank0")
    job = store.create_job("job", start, optimizer=optimizer, workers=2, worker_timeout_ms=60_000)
    train(job, [model, net()], ROUNDS)
    for name in ("1.running_mean", "1.running_var"):
        buffer = model.get_buffer(name).numpy()
        np.testing.assert_allclose(buffer, of_ddp["sgd-buffers"][name], rtol=2e-6, atol=2e-6, err_msg=name)


def plain_sgd(rounds: int) -> Weights:
    """A plain loop of PyTorch."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for round_ in range(rounds):
        sgd.zero_grad()
        loss_of(model, 0, round_).backward()
        sgd.step()
    return weights_of(model)


# -- gradients that leave early ------------------------------------------------------------------------------------


@pytest.mark.contract
def test_with_overlap_the_same_bits(store: Store, transport: str) -> None:
    ends, hidden = [], 30_000  # several chunks
    for overlap in (False, True):
        job = create(store, net(hidden), name=f"job-{overlap}", transport=transport)
        ends.append(train(job, [net(hidden), net(hidden)], 3, overlap=overlap))
    assert_same_bits(*ends)


def test_overlap_sends_before_step(store: Store) -> None:
    """The last layer's gradient has left when the first one's is computed."""
    model = net()
    job = create(store, model, workers=1)
    with kvps.torch.join(job, model, "w0", overlap=True) as worker:

        def put_again(_: torch.Tensor) -> None:
            for name in ("1.weight", "1.bias", "3.weight", "3.bias"):
                with pytest.raises(kvps.LayoutMismatch, match=f"'{name}' was put already"):
                    worker.session.put(name, model.get_parameter(name).detach())
            seen.append(True)

        seen: list[bool] = []
        model[0].weight.register_hook(put_again)
        worker.pull()
        loss_of(model, 0, 0).backward()
        assert seen == [True]
        worker.step()


def test_overlap_refuses_what_comes_after_and_the_next_round_goes_on(store: Store) -> None:
    model = net()
    job = create(store, model, torch.optim.SGD(model.parameters(), lr=0.1), workers=1)

    def clipped(worker: kvps.torch.TorchSession) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        worker.step()

    def cleared(worker: kvps.torch.TorchSession) -> None:
        model.zero_grad()
        worker.step()

    def again(worker: kvps.torch.TorchSession) -> None:
        loss_of(model, 0, 1).backward()

    def unscaled(worker: kvps.torch.TorchSession) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.zeros(()))  # makes its scale
        scaler.step(worker)

    with aggregating(job), kvps.torch.join(job, model, "w0", overlap=True) as worker:
        for mistake in (clipped, cleared, again, unscaled):
            worker.pull()
            loss_of(model, 0, 0).backward()
            with pytest.raises(kvps.WrongOrder, match="overlap=False"):
                mistake(worker)
        for _ in range(2):
            one_round(worker, model)
        worker.pull()
    assert job.state().version == 2
    assert_close(weights_of(model), plain_sgd(2))


def test_a_worker_that_is_dropped_leaves_the_model_alone(store: Store) -> None:
    model = net()
    worker = kvps.torch.join(create(store, model, workers=1), model, "w0", overlap=True)
    heart = worker.session._membership._heartbeat
    worker.pull()
    del worker
    loss_of(model, 0, 0).backward()
    heart.join(120)
    assert not heart.is_alive()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_a_full_server_refused_is_made_again(store: Store, overlap: bool) -> None:
    model = net()
    job = create(store, model, torch.optim.SGD(model.parameters(), lr=0.1), workers=1)
    with kvps.torch.join(job, model, "w0", overlap=overlap) as worker:
        worker.pull()
        loss_of(model, 0, 0).backward()
        with full_server(store), pytest.raises(kvps.ServerFull):
            worker.step()
        with aggregating(job):
            assert worker.step() == 1
            worker.pull()
    assert_close(weights_of(model), plain_sgd(1))


# -- what a model may have -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the last layer too, a layer that is frozen, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.unused = nn.Linear(2, 1, bias=False)
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.frozen(self.emb(x)))) * self.scale


def test_tied_frozen_and_buffers(store: Store) -> None:
    torch.manual_seed(3)
    model = Tied()
    frozen, unused = model.frozen.weight.clone(), model.unused.weight.detach().clone()
    job = create(store, model, torch.optim.SGD(model.parameters(), lr=0.1), workers=1)
    assert [p.name for p in job.layout.parameters] == [
        "scale",
        "emb.weight",
        "norm.weight",
        "norm.bias",
        "unused.weight",
    ]
    x = torch.tensor([0, 3, 5, 5])
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        worker.pull()
        nn.functional.cross_entropy(model(x), x).backward()
        expected = model.emb.weight.detach() - 0.1 * model.emb.weight.grad
        mean = model.norm.running_mean.clone()
        worker.step()
        worker.pull()
        assert model.out.weight is model.emb.weight
        torch.testing.assert_close(model.out.weight.detach(), expected)
        assert torch.equal(model.frozen.weight, frozen)
        assert torch.equal(model.unused.weight, unused), "without a gradient it counts as zeros"
        assert torch.equal(model.norm.running_mean, mean)  # a worker's own
        assert model.emb.weight.grad is None
    other = Tied()
    assert kvps.torch.load(job, other) == 1
    assert torch.equal(other.emb.weight, model.emb.weight)
    assert torch.equal(other.norm.running_mean, torch.zeros(3))


def test_the_weights_pulled_are_copies_in_the_models_own_memory(store: Store) -> None:
    model = net(30_000)
    job = create(store, model, workers=1, transport="shm")
    with kvps.torch.join(job, model, "w0") as worker:
        where = model[0].weight.data_ptr()
        worker.pull()
        assert model[0].weight.data_ptr() == where
        with torch.no_grad():
            model[0].weight.fill_(9)
    assert not (job.snapshot()[1]["0.weight"] == 9).any()


class Checkpointed(nn.Module):
    """A layer that is used in two checkpointed blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self._reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_overlap(store: Store, reentrant: bool) -> None:
    """The re-entrant one runs a backward of its own for each block, so a gradient is added to after it was sent."""
    model = Checkpointed(reentrant)
    job = store.create_job("job", kvps.torch.parameters(model), workers=1, worker_timeout_ms=60_000)
    with kvps.torch.join(job, model, "w0", overlap=True) as worker:
        worker.pull()
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        if reentrant:
            with pytest.raises(kvps.WrongOrder, match=r"second backward\(\) or .* use_reentrant=False, or"):
                loss.backward()
        else:
            loss.backward()
            assert worker.step(loss) == 1


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_parameters_are_trained(store: Store, transport: str) -> None:
    model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 2), nn.Linear(2, 1))
    job = store.create_job("job", kvps.torch.parameters(model), workers=1, transport=transport)
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        for _ in range(2):
            worker.pull()
            model(torch.ones(3, 4)).sum().backward()
            worker.step()
    assert kvps.torch.load(job, model) == 2


def test_a_worker_is_not_pickled(store: Store) -> None:
    model = nn.Linear(2, 1)
    job = store.create_job("job", kvps.torch.parameters(model), workers=1, worker_timeout_ms=60_000)
    with kvps.torch.join(job, model, "w0") as worker, pytest.raises(kvps.KvpsError, match="hand over the job"):
        pickle.dumps(worker)


# -- what a loop may do --------------------------------------------------------------------------------------------


def scaled(scaler: torch.amp.GradScaler, spoil: set[int]) -> Round:
    """A round with a GradScaler; in the attempts that are to be spoilt a gradient is infinite."""
    attempts = iter(range(1000))

    def round_(worker: kvps.torch.TorchSession, model: nn.Module) -> None:
        worker.pull()
        loss = loss_of(model, worker.session.rank, worker.session.round)
        scaler.scale(loss).backward()
        if next(attempts) in spoil:
            model[3].bias.grad[0] = math.inf
        scaler.step(worker, loss)
        scaler.update()

    return round_


def test_a_grad_scaler_takes_the_worker_for_an_optimizer(store: Store) -> None:
    """Its scale is a power of two: what it unscales has the bits that were. A round that it skips is done again."""
    whole = train(create(store, net(), name="whole", workers=1), [net()], 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert_same_bits(train(create(store, net(), workers=1), [net()], 4, scaled(scaler, {1, 2})), whole)
    assert scaler.get_scale() == 256


@pytest.mark.contract
def test_a_worker_that_comes_back_goes_on(store: Store) -> None:
    """BSP to the same bits, though its model is a new one."""
    whole = train(create(store, net(), name="whole", workers=1), [net()], 6)
    job = create(store, net(), workers=1)
    model = net()
    with aggregating(job):
        worker = kvps.torch.join(job, model, "w0")
        while worker.session.round < 3:
            one_round(worker, model)
        worker.leave(finished=False)
    fresh = net()
    nn.init.zeros_(fresh[0].weight)
    assert_same_bits(train(job, [fresh], 6), whole)


@pytest.mark.contract
def test_a_worker_of_a_stopped_or_suspended_job_ends_its_loop(store: Store) -> None:
    """A suspended one goes on later, to the same bits, with the state of its inner optimizer."""
    adam = OPTIMIZERS["adam"]

    def rounds(job: kvps.Job, model: nn.Module, until: Callable[[kvps.torch.TorchSession], bool]) -> None:
        with kvps.torch.join(job, model, "w0", inner=adam(model.parameters()), local_steps=2) as worker:
            while not until(worker):
                one_round(worker, model)
        assert worker.stopping == (job.state().run.state == "stopped")

    def suspended(worker: kvps.torch.TorchSession) -> bool:
        if worker.session.round == 3:
            job.suspend()
        return False

    def stopped(worker: kvps.torch.TorchSession) -> bool:
        if worker.session.round == 6:
            job.stop("enough")
        return False

    ends = []
    for name in ("whole", "parts"):
        model = net()
        settings: dict[str, Any] = {"workers": 1, "local_steps": 2, "worker_timeout_ms": 60_000}
        job = store.create_job(name, kvps.torch.parameters(model), optimizer=kvps.SGD(lr=1.0), **settings)
        with aggregating(job):
            if name == "parts":
                with pytest.raises(kvps.JobSuspended):
                    rounds(job, model, suspended)
                job.resume()
                model = net()
            rounds(job, model, stopped)
            assert job.await_finished()
        kvps.torch.load(job, model)
        ends.append(weights_of(model))
    assert_same_bits(*ends)


# -- what is refused -----------------------------------------------------------------------------------------------


def refusals() -> Iterator[Any]:
    """Model, and what is said of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that lazy modules are new
        lazy = nn.LazyLinear(3)
    yield pytest.param(nn.Linear(2, 2).double(), "'weight' is float64: a job's weights are float32", id="float64")
    yield pytest.param(lazy, "'weight' has no shape yet", id="lazy")
    yield pytest.param(nn.Linear(2, 2, device="meta"), "'weight' is on the device meta", id="meta")
    complex_ = nn.ParameterDict({"w": torch.zeros(3, dtype=torch.complex64)})
    yield pytest.param(complex_, r"'w' is complex64, .*torch\.view_as_real.*view_as_complex", id="complex")
    with torch.inference_mode():
        frozen = nn.Linear(2, 1)
    yield pytest.param(frozen, r"was made under torch\.inference_mode\(\) and cannot be trained", id="inference")
    yield pytest.param(nn.ReLU(), "no parameter that requires a gradient", id="none")
    yield pytest.param({"w": torch.zeros(2)}, r"a model is a torch.nn.Module, not dict", id="dict")


@pytest.mark.parametrize(("model", "said"), list(refusals()))
def test_models_that_are_refused(store: Store, model: Any, said: str) -> None:
    job = create(store, net())
    for call in (kvps.torch.parameters, lambda m: kvps.torch.join(job, m, "w0")):
        with pytest.raises(kvps.LayoutMismatch, match=said) as error:
            call(model)
        assert "\n" not in str(error.value)
    assert not job.state().members


def test_another_model_is_refused_before_it_joins(store: Store) -> None:
    job = create(store, net())
    with pytest.raises(kvps.LayoutMismatch, match=r"do not fit the job: missing 0.weight, .*; unknown weight, bias"):
        kvps.torch.join(job, nn.Linear(2, 2), "w0")
    with pytest.raises(kvps.LayoutMismatch, match=r"'0.weight' has shape \(33, 20\), the job's has \(32, 20\)"):
        kvps.torch.join(job, net(33), "w0")
    assert not job.state().members


def test_steps_that_are_refused_change_nothing(store: Store) -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    job = create(store, model, torch.optim.SGD(model.parameters(), lr=0.1), workers=1)
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        worker.pull()
        with pytest.raises(kvps.WrongOrder, match=r"call loss\.backward"):
            worker.step()
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(kvps.LayoutMismatch, match=r"'0.weight' is sparse: .* sparse=False"):
            worker.step()
        model[0].weight.grad = model[0].weight.grad.to_dense()
        for loss, said in ((torch.ones(3), r"Tensor of shape \(3,\)"), (lambda: 1.0, "function"), ("x", "str")):
            with pytest.raises(kvps.UsageError, match=f"the loss must be one number, not {said}"):
                worker.step(loss)  # type: ignore[arg-type]
        model[1].bias.grad[0] = math.nan
        with pytest.raises(kvps.NotFinite, match=r"'1.bias' holds NaN or Inf"):
            worker.step()
        model[1].bias.grad[0] = 1
        assert worker.step(torch.ones(1)) == 1
        with pytest.raises(kvps.WrongOrder, match="needs a pull"):
            worker.step()
        with ThreadPoolExecutor(1) as pool, pytest.raises(kvps.WrongOrder, match="belongs to the thread that joined"):
            pool.submit(worker.pull).result()
        assert model[1].bias.grad is not None
    assert newest_losses(job)["w0"] == 1


def optimizer_refusals() -> Iterator[Any]:
    """How an optimizer (and a scheduler) is made of a model, and what is said of it."""
    o, s = torch.optim, lr_scheduler

    def stepped(m: nn.Module) -> o.Optimizer:
        sgd = o.Adam(m.parameters())
        loss_of(m, 0, 0).backward()
        sgd.step()
        return sgd

    def preset(m: nn.Module) -> o.Optimizer:
        adam = o.Adam(m.parameters())
        adam.state[m[0].weight] = {"step": torch.zeros(()), "exp_avg_sq": torch.ones(3, 4)}
        return adam

    def hooked(m: nn.Module) -> o.Optimizer:
        sgd = o.SGD(m.parameters(), lr=0.1)
        sgd.register_step_post_hook(lambda *_: m[0].weight.data.clamp_(-1, 1))
        return sgd

    def patched(m: nn.Module) -> o.Optimizer:
        sgd = o.SGD(m.parameters(), lr=0.1)
        sgd.step = lambda: None  # type: ignore[method-assign, assignment, misc]
        return sgd

    def scheduled(m: nn.Module) -> o.Optimizer:
        sgd = o.SGD(m.parameters(), lr=0.1)
        s.StepLR(sgd, 3)
        return sgd

    def anothers(m: nn.Module) -> tuple[Any, ...]:
        return o.SGD(m.parameters(), lr=0.1), s.StepLR(o.SGD(m.parameters(), lr=0.1), 3)

    def every(m: nn.Module) -> tuple[Any, ...]:
        sgd = o.SGD(m.parameters(), lr=0.1)
        return sgd, s.StepLR(sgd, 3), 0

    yield lambda m: "sgd", "one of torch.optim, not str"
    yield lambda m: o.Rprop(m.parameters()), "kvps has no Rprop: of torch.optim it has Adadelta, Adagrad, Adam"
    yield lambda m: o.Adam(m.parameters(), eps=0.0), "adam: eps must be above 0"
    yield lambda m: o.Adagrad(m.parameters(), initial_accumulator_value=0.1), "Adagrad with initial_accumulator_value"
    yield lambda m: o.SGD([{"params": m.parameters(), "scale": 3}]), "scale=3, a setting that kvps does not know"
    yield lambda m: o.SGD(m[0].parameters()), r"does not step '1.weight'"
    yield lambda m: o.SGD([*m.parameters(), nn.Parameter(torch.ones(1))]), "no parameters of the model"
    yield stepped, "has a state already"
    yield preset, "has a state already"
    yield hooked, "has a step of its own"
    yield patched, "has a step of its own"
    yield scheduled, r"give it too, scheduler=\.\.\."
    yield anothers, "another optimizer's"
    yield every, "every must be a whole number of rounds from 1, not 0"


@pytest.mark.parametrize(("make", "said"), list(optimizer_refusals()))
def test_optimizers_that_are_refused(make: Callable[[nn.Module], Any], said: str) -> None:
    model = net()
    made = make(model)
    with pytest.raises(kvps.InvalidSetting, match=said) as error:
        kvps.torch.optimizer(model, *(made if isinstance(made, tuple) else (made,)))
    assert "\n" not in str(error.value)


def test_without_pytorch_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import kvps.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: kvps.torch needs PyTorch, which is not installed: pip install '.[torch]' in a clone of kvps"
    )
    assert "During handling" not in done.stderr
