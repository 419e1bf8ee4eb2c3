"""Local steps of PyTorch's optimizers, held against plain loops of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arrays import assert_close, assert_same_bits
from helpers.ddp import loss_of, net, train_on, weights_of
from helpers.digits_job import run_workers
from helpers.faults import full_server
from helpers.harness import aggregating, await_version, check_chain
from helpers.waiting import eventually
from torch import nn
from torch.optim import lr_scheduler

import kvps
import kvps.torch
from kvps.config import JobConfig
from kvps.store import Store
from kvps.torch.local_steps import LocalSteps

Weights = dict[str, np.ndarray]
Inner = Callable[[Any], torch.optim.Optimizer]
DILOCO = kvps.SGD(lr=0.7, momentum=0.9, nesterov=True)
MEAN = kvps.SGD(lr=1.0)
STEPS, ROUNDS = 3, 4


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.01)  # has a state before its first step


def create(store: Store, model: nn.Module, outer: kvps.optim.Optimizer = MEAN, **settings: Any) -> kvps.Job:
    settings = {"workers": 1, "transport": "redis", "worker_timeout_ms": 60_000} | settings
    return store.create_job("job", kvps.torch.parameters(model), optimizer=outer, **settings)


def joined(job: kvps.Job, model: nn.Module, make: Inner = sgd, steps: int = 2, **how: Any) -> kvps.torch.TorchSession:
    return kvps.torch.join(job, model, "w0", inner=make(model.parameters()), local_steps=steps, **how)


def trained(
    job: kvps.Job, make: Inner, batches: int, hidden: int = 32, samples: Sequence[int | None] = (None, None)
) -> Weights:
    """Train each worker on a thread, with a scheduler of the user's own, and batches of so many `samples`; return the
    weights at the end."""
    models = [net(hidden) for _ in range(job.config.workers)]

    def run(number: int, model: nn.Module) -> None:
        inner = make(model.parameters())
        scheduler = lr_scheduler.StepLR(inner, 5, 0.5)
        with kvps.torch.join(job, model, f"w{number}", inner=inner, local_steps=STEPS) as worker:
            for each in range(batches):
                train_on(worker, model, each, samples[number])
                scheduler.step()

    run_workers(job, *(partial(run, number, model) for number, model in enumerate(models)))
    assert kvps.torch.load(job, models[0]) == check_chain(job)
    return weights_of(models[0])


def plain(
    workers: int, make: Inner, outer: Inner, batches: int, hidden: int = 32, samples: Sequence[int] = (1, 1)
) -> Weights:
    """The same in PyTorch alone: replicas with optimizers that go on, and an outer optimizer on the mean difference."""
    main, replicas = net(hidden), [net(hidden) for _ in range(workers)]
    inners = [make(replica.parameters()) for replica in replicas]
    schedulers = [lr_scheduler.StepLR(inner, 5, 0.5) for inner in inners]
    outermost = outer(main.parameters())
    for first in range(0, batches, STEPS):
        for rank, (replica, inner) in enumerate(zip(replicas, inners, strict=True)):
            with torch.no_grad():
                for parameter, newest in zip(replica.parameters(), main.parameters(), strict=True):
                    parameter.copy_(newest)
            for number in range(first, min(first + STEPS, batches)):
                inner.zero_grad()
                loss_of(replica, rank, number).backward()
                inner.step()
                schedulers[rank].step()
        for number, parameter in enumerate(main.parameters()):
            ends = [list(replica.parameters())[number].detach() for replica in replicas]
            far = [each * (parameter.detach() - end) for each, end in zip(samples, ends, strict=True)]
            parameter.grad = torch.stack(far).sum(0) / sum(samples)
        outermost.step()
    return weights_of(main)


# -- the algorithms of docs/other-systems.md -----------------------------------------------------------------------


def test_diloco_is_the_loop_of_its_paper(store: Store) -> None:
    """AdamW inside, Nesterov's momentum outside, on two workers; the last round has fewer steps."""
    batches = STEPS * ROUNDS + 1
    job = create(store, net(), DILOCO, workers=2)
    ends = trained(job, adamw, batches)
    nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    assert_close(ends, plain(2, adamw, nesterov, batches), 1e-5)
    assert job.state().version == ROUNDS + 1


def test_an_outer_optimizer_of_fedopt_steps_on_the_mean_difference(store: Store) -> None:
    """FedAdam. tests/optim holds the steps of all optimizers against PyTorch's, or their papers."""
    job = create(store, net(), kvps.Adam(lr=0.01, beta2=0.99, eps=1e-3), workers=2)
    adam = partial(torch.optim.Adam, lr=0.01, betas=(0.9, 0.99), eps=1e-3)
    assert_close(trained(job, sgd, STEPS * ROUNDS), plain(2, sgd, adam, STEPS * ROUNDS), 1e-5)


@pytest.mark.parametrize("outer", [kvps.SGD(lr=0.5), kvps.DelayedNesterov(lr=0.7, every=2)], ids=str)
def test_asynchronous_workers_take_local_steps(store: Store, outer: kvps.optim.Optimizer) -> None:
    """Asynchronous local SGD: no one waits, every pseudo-gradient counts once, and the loss falls."""
    model = net()
    before = loss_of(model, 0, 100).item()
    reduction = "mean" if isinstance(outer, kvps.SGD) else "sum"
    job = create(store, model, outer, workers=2, staleness=-1, reduction=reduction)
    ends = trained(job, sgd, STEPS * 8)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in ends.items()}, strict=False)
    assert loss_of(model, 0, 100).item() < before
    assert job.state().clock == {"w0": 8, "w1": 8}


def test_local_sgd_averages_the_weights_of_a_model_of_several_chunks(store: Store, transport: str) -> None:
    """The outer rate 1 makes the mean of the workers' weights: LocalSGD, FedAvg with equal parts, model averaging."""
    hidden = 30_000
    job = create(store, net(hidden), MEAN, workers=2, transport=transport)
    ends = trained(job, sgd, STEPS * 2, hidden)
    assert_close(ends, plain(2, sgd, partial(torch.optim.SGD, lr=1.0), STEPS * 2, hidden), 1e-5)


def test_fedavg_weighs_workers_by_their_samples(store: Store) -> None:
    """Each model counts by the samples that it has seen since the last version."""
    job, samples = create(store, net(), MEAN, workers=2, reduction="weighted"), (30, 10)
    ends = trained(job, sgd, 2 * STEPS, samples=samples)
    assert_close(ends, plain(2, sgd, partial(torch.optim.SGD, lr=1.0), 2 * STEPS, samples=samples), 1e-5)
    assert [[c.weight for c in commit.plan.contributions] for commit in job.log()] == [[90, 30]] * 2


# -- one round -----------------------------------------------------------------------------------------------------


def test_only_the_last_step_of_a_round_pushes(store: Store) -> None:
    model = net()
    job = create(store, model, local_steps=STEPS)
    with aggregating(job), joined(job, model, steps=STEPS) as worker:
        assert [train_on(worker, model, number) for number in range(2 * STEPS)] == [0, 0, 1, 1, 1, 2]
        assert (worker.session.round, worker.session.version) == (2, 1)
        worker.pull()
        assert worker.session.version == 2
    assert job.state().version == 2, "a round without a step pushes nothing"


def test_who_leaves_pushes_the_steps_that_are_left(store: Store) -> None:
    model = net()
    job = create(store, model)
    with aggregating(job):
        with joined(job, model, steps=50) as worker:
            for number in range(STEPS):
                train_on(worker, model, number)
            ours = weights_of(model)
            worker.leave()
            worker.leave()
        job.await_finished()
    assert kvps.torch.load(job, model) == 1
    assert_close(weights_of(model), ours, 2e-7)


def test_whose_loop_fails_pushes_nothing_more(store: Store) -> None:
    model = net()
    job = create(store, model)
    with aggregating(job):
        worker = joined(job, model, steps=5)

        def failing() -> None:
            with worker:
                train_on(worker, model, 0)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            failing()
        with joined(job, model, steps=5) as other:
            assert other.session.clock == 0, "and it has left"


def test_a_part_of_a_unit_is_not_pushed(store: Store) -> None:
    """Another worker gets the whole unit."""
    model = net()
    job = create(store, model, units=2)
    with aggregating(job):
        with joined(job, model) as worker:
            assert worker.session.next_unit() == 0
            assert [train_on(worker, model, number) for number in range(2)] == [0, 1]
            assert worker.session.next_unit() == 1
            train_on(worker, model, 2)
        with joined(job, model) as worker:
            assert (worker.session.clock, worker.session.next_unit()) == (1, 1)


def tokens_of(unit: int, step: int) -> int:
    return 1 + (3 * unit + step) % 7


def merged_by_tokens(units: int, units_per_round: int) -> Weights:
    """The same in PyTorch alone: a version is the mean of its units' weights, each by its tokens."""
    main = net()
    for first in range(0, units, units_per_round):
        ends, tokens = [], []
        for unit in range(first, min(units, first + units_per_round)):
            replica = net()
            replica.load_state_dict(main.state_dict())
            inner = adagrad(replica.parameters())  # it begins anew in each unit
            for step in range(STEPS):
                inner.zero_grad()
                loss_of(replica, unit, step).backward()
                inner.step()
            tokens.append(sum(tokens_of(unit, step) for step in range(STEPS)))
            ends.append([tokens[-1] * parameter.detach() for parameter in replica.parameters()])
        with torch.no_grad():
            for number, parameter in enumerate(main.parameters()):
                parameter.copy_(torch.stack([end[number] for end in ends]).sum(0) / sum(tokens))
    return weights_of(main)


def test_learners_of_different_speeds_do_units_that_are_merged_by_their_tokens(store: Store) -> None:
    """The fast learner does more of them. Which one did a unit changes no bit."""
    ends, units = [], 6

    def learn(job: kvps.Job, name: str, done: list[int], wait: Callable[[], object]) -> None:
        model = net()
        with kvps.torch.join(job, model, name, inner=adagrad(model.parameters()), local_steps=STEPS) as worker:
            while (unit := worker.session.next_unit()) is not None:
                wait()
                for step in range(STEPS):
                    worker.pull()
                    loss = loss_of(model, unit, step)
                    loss.backward()
                    worker.step(loss, weight=tokens_of(unit, step))
                done.append(unit)

    for workers in (1, 2):
        slow, fast = list[int](), list[int]()

        def while_the_other_does_the_rest(workers: int = workers, fast: list[int] = fast) -> None:
            assert workers == 1 or eventually(lambda: len(fast) >= 3)

        job = store.create_job(
            *(f"of{workers}", kvps.torch.parameters(net())), optimizer=MEAN, reduction="weighted", workers=workers,
            units=units, units_per_round=4, backup_after=0, worker_timeout_ms=60_000, transport="redis",
        )  # fmt: skip
        learners = [partial(learn, job, "w0", slow, while_the_other_does_the_rest)]
        run_workers(job, *learners, *([partial(learn, job, "w1", fast, bool)] if workers == 2 else []))
        assert sorted(slow + fast) == list(range(units))
        assert workers == 1 or sum(unit < 4 for unit in fast) == 3
        for commit in job.log():
            for c in commit.plan.contributions:
                assert c.weight == sum(tokens_of(c.unit, step) for step in range(STEPS))
        check_chain(job)
        ends.append(job.snapshot()[1])
    assert_same_bits(*ends)
    assert_close(ends[0], merged_by_tokens(units, 4), 1e-6)


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [False, True])
def test_a_push_that_a_full_server_refused_is_repeated_without_another_step(store: Store, leaves: bool) -> None:
    model = net()
    job = create(store, model)
    with joined(job, model) as worker:
        for number in range(2):
            worker.pull()
            loss_of(model, 0, number).backward()
            if number == 0:
                worker.step()
        for _ in range(2):
            with full_server(store), pytest.raises(kvps.ServerFull):
                worker.step()
            ours = weights_of(model)
        with aggregating(job):
            assert leaves or worker.step() == 1
            assert_same_bits(weights_of(model), ours)
            worker.leave()
            job.await_finished()
    kvps.torch.load(job, model)
    assert_close(weights_of(model), ours, 2e-7)
    twin = net()
    inner = sgd(twin.parameters())
    for number in range(2):
        inner.zero_grad()
        loss_of(twin, 0, number).backward()
        inner.step()
    assert_same_bits(ours, weights_of(twin))


@pytest.mark.parametrize("nonfinite", ["reject", "skip"])
def test_a_gradient_with_nan_reaches_no_optimizer(store: Store, nonfinite: str) -> None:
    model = net()
    inner = adamw(model.parameters())
    job = create(store, model, nonfinite=nonfinite)
    with aggregating(job), kvps.torch.join(job, model, inner=inner, local_steps=2) as worker:
        worker.pull()
        loss_of(model, 0, 0).backward()
        model[3].bias.grad[0] = math.nan
        before = weights_of(model)
        if nonfinite == "reject":
            with pytest.raises(kvps.NotFinite, match=r"'3\.bias' holds NaN or Inf, and no step was taken"):
                worker.step()
            train_on(worker, model, 0)
        else:
            assert worker.step() == 0
            assert_same_bits(weights_of(model), before)
        assert train_on(worker, model, 1) == 1
    assert all(bool(torch.isfinite(s["exp_avg"]).all()) for s in inner.state.values())


def test_a_large_gradient_whose_sum_overflows_counts() -> None:
    x = nn.Parameter(torch.zeros(4))
    local = LocalSteps({"x": x}, torch.optim.SGD([x], lr=1e-38), 1, JobConfig())
    local.begin(True)
    x.grad = torch.full((4,), 3e38)
    assert local.take(None)
    assert (x < -2).all()


def test_a_wrong_loop_is_told(store: Store) -> None:
    model = net()
    job = create(store, model)
    with joined(job, model, steps=3) as worker:
        with pytest.raises(kvps.WrongOrder, match=r"step\(\) needs a pull\(\) before it"):
            worker.step()
        worker.pull()
        with pytest.raises(kvps.WrongOrder, match=r"call loss.backward\(\)"):
            worker.step()
        loss_of(model, 0, 0).backward()
        worker.step()
        with pytest.raises(kvps.WrongOrder, match=r"between local steps that clears the gradients"):
            worker.step()
        ours = weights_of(model)
        worker.pull()
        loss_of(model, 0, 1).backward()
        worker.step()
        assert any((array != ours[name]).any() for name, array in weights_of(model).items())
        worker.leave()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda m: {"inner": sgd(m.parameters()), "overlap": True}, "a pseudo-gradient exists only after the last"),
        (lambda m: {"inner": sgd([*m.parameters(), nn.Parameter(torch.ones(1))])}, "no parameters of the model"),
        (lambda m: {"inner": torch.optim.LBFGS(m.parameters())}, "LBFGS needs one"),
        (lambda m: {"inner": kvps.SGD()}, "inner must be an optimizer of torch.optim, or a list of them, not SGD"),
        (lambda m: {"inner": [sgd(m.parameters()), sgd(m.parameters())]}, "step the same parameter: give each its own"),
        (
            lambda m: {"inner": muon_and_adamw(m.parameters())[:1]},
            r"'1.weight', .* or to another one, as inner=\[muon,",
        ),
        (lambda m: {"inner": sgd(m.parameters()), "local_steps": 0}, "whole number from 1 to 1000000, not 0"),
        (lambda m: {"inner": sgd(m.parameters()), "local_steps": True}, "not True"),
        (lambda m: {"inner": sgd(m.parameters()), "local_steps": "auto"}, "not 'auto'"),
        (lambda m: {"inner": None}, "takes 3 local steps needs an optimizer for them: give inner="),
    ],
)
def test_what_cannot_be_is_refused_before_the_join(store: Store, how: Callable[[Any], Any], words: str) -> None:
    model = net()
    job = create(store, model, local_steps=3)
    with pytest.raises(kvps.InvalidSetting, match=words) as caught:
        kvps.torch.join(job, model, **how(model))
    assert "\n" not in str(caught.value)
    assert not job.state().members


# -- what a model may have -----------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """An embedding with sparse gradients, a frozen layer that the optimizer has too, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(7, 3, sparse=True)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.out = nn.Linear(3, 7)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.frozen(self.emb(x)))


def test_sparse_frozen_and_unused_parameters(store: Store) -> None:
    model = Mixed()
    before = {name: array.copy() for name, array in weights_of(model).items()}
    job, x = create(store, model), torch.tensor([0, 3, 5, 5])
    with aggregating(job):
        with joined(job, model) as worker:
            for _ in range(2):
                worker.pull()
                nn.functional.cross_entropy(model(x), x).backward()
                worker.step()
            ours = weights_of(model)
        job.await_finished()
    kvps.torch.load(job, model)
    after = weights_of(model)
    assert_close(after, ours, 2e-7)
    for name in after:
        assert (after[name] != before[name]).any() == name.startswith(("emb", "out")), name


def test_the_pseudo_gradient_of_bf16_is_float32() -> None:
    x = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    local = LocalSteps({"x": x}, torch.optim.SGD([x], lr=0.5), 1, JobConfig())
    local.begin(True)
    x.grad = torch.tensor([0.5, 1.0], dtype=torch.bfloat16)
    assert local.take(None)
    for _ in range(2):
        pseudo = local.pseudo_gradient("")[1]["x"]
        assert pseudo.dtype == torch.float32
        assert pseudo.tolist() == [0.25, 0.5]


def muon_and_adamw(params: Iterable[nn.Parameter]) -> Any:
    """Muon steps matrices alone."""
    params = list(params)
    matrices, others = ([p for p in params if (p.ndim == 2) == wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def test_several_inner_optimizers_have_the_parameters_of_one_model(store: Store) -> None:
    model, by_hand = net(), net()
    job = create(store, model, local_steps=2)
    inner = muon_and_adamw(by_hand.parameters())
    with aggregating(job):
        worker = joined(job, model, muon_and_adamw, 2)
        for number in range(4):
            train_on(worker, model, number)
            by_hand.zero_grad()
            loss_of(by_hand, 0, number).backward()
            for each in inner:
                each.step()
        worker.leave()
        job.await_finished()
    kvps.torch.load(job, model)
    assert_close(weights_of(model), weights_of(by_hand), far=1e-5)


# -- a worker that comes back --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "gradient_format"),
    [
        (adamw, "int8"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "fp32"),
        (torch.optim.NAdam, "fp32"),
        (lambda p: muon_and_adamw(p), "fp32"),
    ],
)
def test_the_inner_state_survives_a_clean_leave(
    store: Store, caplog: pytest.LogCaptureFixture, make: Inner, gradient_format: str
) -> None:
    """With a new model and a new optimizer, as in a new process; the residual of a lossy format too."""
    ends = []
    for leaves in (False, True):
        job = store.create_job(
            f"job-{leaves}", kvps.torch.parameters(net()), optimizer=MEAN, gradient_format=gradient_format
        )
        model = net()
        with aggregating(job):
            worker = joined(job, model, make, 2)
            for number in range(8):
                if leaves and number in (2, 6):
                    worker.leave(finished=False)
                    model = net()
                    with caplog.at_level("INFO", "kvps.session"):
                        worker = joined(job, model, make, 2)
                    assert "goes on from the state that it left" in caplog.text
                train_on(worker, model, number)
            worker.leave()
            job.await_finished()
        kvps.torch.load(job, model)
        ends.append(weights_of(model))
    assert_same_bits(*ends)


def test_after_a_kill_the_inner_state_starts_anew_and_that_is_said(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    job = create(store, model)
    with aggregating(job):
        first = joined(job, model, adamw, 1)
        train_on(first, model, 0)
        first.leave(finished=False)
        second = joined(job, model, adamw, 1)
        assert "starts anew" not in caplog.text
        train_on(second, model, 1)  # from here on the stored state is not that of what was accepted last
        inner = adamw(model.parameters())
        with kvps.torch.join(job, model, "w0", inner=inner, local_steps=1, takeover=True):
            assert caplog.text.count("its inner AdamW starts anew") == 1
            assert not inner.state


def test_a_round_that_was_given_up_is_in_no_stored_state(store: Store) -> None:
    model = net()
    job = create(store, model)
    with aggregating(job):
        worker = joined(job, model, adamw, 1)
        train_on(worker, model, 0)
        worker.pull()
        loss_of(model, 0, 1).backward()
    with full_server(store), pytest.raises(kvps.ServerFull):
        worker.step()
    worker.pull()
    worker.leave(finished=False)
    with joined(job, model, adamw, 1) as worker:
        assert worker.session.inherited_state() == {}


def adam(parameters: Any, amsgrad: bool) -> torch.optim.Adam:
    """Of two groups, the second of which has this setting; the model's first parameter is there alone."""
    first, *rest = parameters
    return torch.optim.Adam([{"params": rest}, {"params": [first], "amsgrad": amsgrad}], 0.1)


def test_a_parameter_that_is_stepped_later_may_lack_its_state_too(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Its gradient comes with the second step. What the first step did stays."""

    def step(number: int) -> None:
        worker.pull()
        loss_of(model, 0, number).backward()
        if number == 1:
            next(model.parameters()).grad = None
        worker.step()

    model = net()
    job = create(store, model)
    with aggregating(job):
        worker = kvps.torch.join(job, model, "w0", inner=adam(model.parameters(), False), local_steps=1)
        step(0)
        worker.leave(finished=False)
        inner = adam(model.parameters(), True)
        with kvps.torch.join(job, model, "w0", inner=inner, local_steps=3) as worker:
            step(1)
            middle = weights_of(model)
            assert "starts anew" not in caplog.text
            step(2)
            assert "the inner Adam starts anew" in caplog.text
            assert len(inner.state) == len(middle)
            assert all(state["step"] == 1 for state in inner.state.values())
            for name, array in weights_of(model).items():
                moved = np.abs(array - middle[name])  # a first step is of the learning rate, where there is a gradient
                assert (np.minimum(moved, np.abs(moved - 0.1)) < 1e-3).all(), name
                assert moved.any(), name


class Begun(torch.optim.SGD):
    """An optimizer that makes its state when it is made, as Adagrad does."""

    def __init__(self, params: Any, name: str) -> None:
        super().__init__(params, lr=0.1)
        self.name = name
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter][name] = torch.ones_like(parameter)

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter][self.name] += 1
        super().step()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (adamw, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "its inner SGD starts anew"),
        (lambda p: adam(p, False), lambda p: adam(p, True), "the worker left lacks 'max_exp_avg_sq'"),
        (lambda p: Begun(p, "a"), lambda p: Begun(p, "b"), "the worker left lacks 'b'"),
    ],
    ids=["another", "amsgrad of the second group", "begun"],
)
def test_a_state_that_does_not_fit_is_not_taken(
    store: Store, caplog: pytest.LogCaptureFixture, first: Inner, second: Inner, words: str
) -> None:
    """Adam keeps one array more with amsgrad. PyTorch raises KeyError, maybe after it has stepped another group."""
    model, twin = net(), net()
    job = create(store, model)
    with aggregating(job):
        worker = joined(job, model, first, 1)
        train_on(worker, model, 0)
        worker.leave(finished=False)
        inner, fresh = second(model.parameters()), second(twin.parameters())
        with kvps.torch.join(job, model, "w0", inner=inner, local_steps=1) as worker:
            worker.pull()
            twin.load_state_dict(model.state_dict())
            train_on(worker, model, 1)
        assert words in caplog.text
    loss_of(twin, 0, 1).backward()
    fresh.step()
    assert_same_bits(weights_of(twin), weights_of(model))
    kept = [[sorted(state) for state in each.state.values()] for each in (inner, fresh)]
    assert kept[0] == kept[1]


class Odd(torch.optim.SGD):
    """An optimizer that keeps what kvps cannot store."""

    kept: Any = None

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = self.kept


@pytest.mark.parametrize(
    ("kept", "finished"),
    [
        (True, True),
        *((kept, False) for kept in (True, 1 << 63, torch.tensor(True), torch.tensor(3, dtype=torch.int32), "a word")),
    ],
)
def test_a_state_that_cannot_be_stored_keeps_nobody_from_leaving(store: Store, kept: Any, finished: bool) -> None:
    model = net()
    job = create(store, model)
    inner = Odd(model.parameters(), lr=0.1)
    inner.kept = kept
    with aggregating(job):
        worker = kvps.torch.join(job, model, "w0", inner=inner, local_steps=1)
        train_on(worker, model, 0)
        worker.leave(finished)
        await_version(job, 1)
    assert job.state().members["w0"].finished == finished


def test_a_worker_whose_stored_state_is_gone_has_left(store: Store) -> None:
    model = net()
    job = create(store, model)
    with aggregating(job):
        worker = joined(job, model, adamw, 1)
        train_on(worker, model, 0)
        worker.leave(finished=False)
    key = job.access.keys.residual(0, "w0", worker.session.incarnation, 1, len(job.layout.chunks[0]))
    store.client.call("DEL", key)
    with pytest.raises(kvps.CorruptData, match=r"'w0'.* stored when it left is not there"):
        joined(job, model, adamw, 1)
    job.join("w0").leave()


def test_a_round_has_the_weights_of_its_steps(store: Store) -> None:
    job, model = create(store, net(), reduction="weighted"), net()
    inner = sgd(model.parameters())
    with aggregating(job):
        worker = kvps.torch.join(job, model, "w0", inner=inner, local_steps=STEPS)
        for weight in [5, 6, 7, 1, None, 2, None, None, None, 4]:
            worker.pull()
            loss_of(model, 0, 0).backward()
            with pytest.raises(kvps.InvalidSetting, match="weight must be a whole number from 1"):
                worker.step(weight=0)
            worker.step(weight=weight)
        worker.leave()
        await_version(job, 4)
    assert [c.weight for commit in job.log() for c in commit.plan.contributions] == [18, 3, 1, 4]


def test_a_round_that_came_late_is_dropped_and_the_next_begins_with_a_pull(store: Store) -> None:
    job = create(store, net(), workers=2, quorum=1, late="drop")
    models = [net(), net()]
    with aggregating(job):
        fast, slow = (
            kvps.torch.join(job, model, f"w{rank}", inner=adamw(model.parameters()), local_steps=2)
            for rank, model in enumerate(models)
        )
        train_on(slow, models[1], 0)
        for number in range(2):
            train_on(fast, models[0], number)
        await_version(job, 1)
        with pytest.raises(kvps.ContributionLate):
            train_on(slow, models[1], 1)
        slow.pull()
        assert slow.session.version == 1
        loss_of(models[1], 1, 1).backward()
        slow.step()
        assert train_on(slow, models[1], 2) == 1
        slow.leave()
        await_version(job, 2)
        train_on(fast, models[0], 2)
        fast.leave()
        job.await_finished()
    check_chain(job)
    bases = [[(c.worker, c.base) for c in commit.plan.contributions] for commit in job.log()]
    assert [names[0] for names in bases] == [("w0", 0), ("w1", 1), ("w0", 2)]
