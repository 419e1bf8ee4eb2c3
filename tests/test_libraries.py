"""The examples with other libraries, trained by two copies under `kvps run`, held against two processes of
DistributedDataParallel over gloo on the same batches; see helpers/libraries.py. And libraries that are stopped and
resumed, held against themselves without a stop; see helpers/resuming_libraries.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from helpers import libraries, resuming_libraries, uneven_texts
from helpers.arrays import assert_close, assert_same_bits
from helpers.commands import KVPS, Started, private_store, run
from helpers.pages import python_in
from helpers.servers import free_port
from helpers.torch_process import ends_of_ddp, importing
from helpers.waiting import eventually

import kvps
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import newest

pytestmark = pytest.mark.slow  # each test imports a large library
PROGRAM = [sys.executable, libraries.__file__]
LibraryPopen = importing(
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "lightning",
    "accelerate",
    "jax",
    "optax",
    "kvps.jax",
)


class Ended(NamedTuple):
    """How a training ended: the last weights, and the loss of each batch, (workers, batches)."""

    weights: dict[str, np.ndarray]
    losses: np.ndarray


def by_kvps(store: kvps.Store, folder: Path, example: str, *arguments: str) -> Ended:
    """Run an example as two copies."""
    folder = folder / "-".join(["kvps", *arguments])
    folder.mkdir()
    name = "-".join([example, *arguments])
    copies = [*PROGRAM, "copy", example, str(folder), *arguments]
    command = [*KVPS, "run", "-w", "2", "--job", name, "--", *copies]
    printed = Started(command, os.environ | {"KVPS_REDIS_URL": store.url}, LibraryPopen).output()
    job = store.job(name)
    state = job.state()
    assert state.finished(job.config)
    assert re.search(rf"loss \d+\.\d+, version {state.version}$", printed, re.MULTILINE), printed
    return Ended(job.snapshot()[1], libraries.losses_in(folder))


def by_ddp(folder: Path, example: str, *arguments: str) -> Ended:
    """Run what an example is compared with as two ranks."""
    folder = folder / "ddp"
    folder.mkdir()
    of_ranks = ends_of_ddp(
        folder, "-".join([example, *arguments]), str(free_port()), program="libraries.py", popen=LibraryPopen
    )
    return Ended(of_ranks["weights"], libraries.losses_in(folder))


def assert_same(one: Ended, other: Ended, loss: float = 2e-6, far: float = 3e-6) -> None:
    """Each loss within so large a part of the other's, and each weight within `far` of its array's largest.

    The sum of two gradients has no order, so that the first step is on the same bits. Then the step rounds otherwise:
    kvps rounds each product before it adds, PyTorch and XLA do both at once. The least that either differs by is 1e-7.
    """
    np.testing.assert_array_equal(one.losses[:, 0], other.losses[:, 0])
    np.testing.assert_allclose(one.losses, other.losses, rtol=loss, atol=0)
    assert_close(one.weights, other.weights, far)
    assert (one.losses[:, -1] < 0.8 * one.losses[:, 0]).all()


def test_the_trainer_of_transformers_ends_as_with_distributed_data_parallel(
    store: kvps.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some gradients of a GPT-2 are as small as their own rounding, and AdamW makes steps of ordinary size of them:
    after 40 steps losses were 3e-6 apart, and weights 2.4e-5; on another processor 1.2e-5 and 1.1e-4. The biases of
    keys are left out: softmax does not see them, so that all of their gradient is rounding."""
    monkeypatch.chdir(tmp_path)
    mine, ddp = by_kvps(store, tmp_path, "trainer_gpt2"), by_ddp(tmp_path, "trainer_gpt2")
    for block in range(2):
        for ended in (mine, ddp):
            name = f"transformer.h.{block}.attn.c_attn.bias"
            ended.weights[name] = ended.weights[name].copy()
            ended.weights[name][64:128] = 0
    assert mine.losses.shape == (2, 40)
    assert_same(mine, ddp, loss=5e-5, far=5e-4)


def test_lightning_ends_as_distributed_data_parallel(store: kvps.Store, tmp_path: Path) -> None:
    """Losses were 7e-7 apart, and weights 6e-7."""
    ddp = by_ddp(tmp_path, "lightning_digits")
    automatic, manual = (by_kvps(store, tmp_path, "lightning_digits", *how) for how in ([], ["manual"]))
    assert automatic.losses.shape == (2, 48)
    assert_same(automatic, ddp)
    np.testing.assert_array_equal(automatic.losses, manual.losses)
    assert_same_bits(automatic.weights, manual.weights)


def test_accelerate_that_accumulates_ends_as_distributed_data_parallel(store: kvps.Store, tmp_path: Path) -> None:
    """Losses were 3e-7 apart, and weights 9e-7."""
    mine = by_kvps(store, tmp_path, "accelerate_digits")
    assert mine.losses.shape == (2, 96)
    assert_same(mine, by_ddp(tmp_path, "accelerate_digits"))


@pytest.mark.parametrize(
    ("how", "losses", "loss", "far"), [([], 60, 6e-5, 2e-5), (["local"], 15, 2e-6, 3e-6)], ids=["", "local"]
)
def test_jax_ends_as_the_mean_of_two_processes_of_optax(
    store: kvps.Store, tmp_path: Path, how: list[str], losses: int, loss: float, far: float
) -> None:
    """The nested parameters come back in their form. optax divides Adam's moments by 1 - 0.999**step in float32, which
    is wrong by 3e-5 in the first step, and the aggregator in float64: losses were 1.8e-5 apart, and weights 6e-6. Where
    optax steps itself, with local steps, both were 7e-7 apart."""
    mine = by_kvps(store, tmp_path, "jax_optax", *how)
    assert [*mine.weights] == ["layers/0/b", "layers/0/w", "layers/1/b", "layers/1/w", "scale"]
    assert mine.losses.shape == (2, losses)
    assert_same(mine, by_ddp(tmp_path, "jax_optax", *how), loss, far)


def test_copies_of_trainer_whose_texts_differ_in_length_train_as_one_with_all(
    store: kvps.Store, tmp_path: Path
) -> None:
    """By the recipe that weighs each step by its tokens."""
    program, environment = [sys.executable, uneven_texts.__file__], os.environ | {"KVPS_REDIS_URL": store.url}
    with LibraryPopen([*program, str(tmp_path / "alone.npz")], stderr=subprocess.PIPE) as process:
        assert process.wait(600) == 0
    Started([*KVPS, "run", "-w", "2", "--", *program, str(tmp_path / "two.npz")], environment, LibraryPopen).output()
    assert_close(dict(np.load(tmp_path / "two.npz")), dict(np.load(tmp_path / "alone.npz")), far=1e-5)


def test_a_library_that_is_stopped_resumes_from_its_own_checkpoint_and_does_no_step_twice(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM the job is ahead of the library's checkpoint, with which its loop begins."""
    script = [sys.executable, resuming_libraries.__file__]
    line = [*KVPS, "run", "-w", "2", "--job", "trainer", "--checkpoints", "kept", "--resume", "--", *script]

    def start() -> Started:
        return Started(line, os.environ, LibraryPopen)

    def last() -> Checkpoint:
        found = newest(Path("kept"), "trainer")
        return found.checkpoint

    run = start()
    assert eventually(lambda: Path("waits-0").exists() and Path("waits-1").exists())
    run.process.send_signal(signal.SIGTERM)
    with private_store() as store:
        job = store.job("trainer")
        assert eventually(lambda: job.state().run.state == "suspended")
    Path("go").touch()
    run.output(os.EX_TEMPFAIL)
    version = last().version
    ahead = version - resuming_libraries.SAVED
    assert 0 < ahead < resuming_libraries.STEPS - resuming_libraries.SAVED

    printed = start().output()
    assert f"goes on at version {version}, from {tmp_path}/kept/" in printed
    assert printed.count(f"the next {ahead} steps are passed over, for it has them") == 2, printed
    end = last()

    (tmp_path / "undisturbed").mkdir()
    monkeypatch.chdir("undisturbed")
    Path("go").touch()
    start().output()
    expected = last()
    assert end.version == expected.version == resuming_libraries.STEPS
    assert_same_bits(*(checkpoint.layout.views(checkpoint.weights) for checkpoint in (end, expected)))


LOGS = """
import sys
from helpers.resuming_libraries import Net, Rows
from transformers import Trainer, TrainingArguments
import kvps.torch, torch

model = Net()
with kvps.torch.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model) as optimizer:
    settings = {"max_steps": 6, "warmup_steps": 3, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    arguments = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=2, **settings)
    trainer = Trainer(model, arguments, train_dataset=Rows(optimizer.rank, 6), optimizers=(optimizer, None))
    trainer.train()
    print(f"rates {optimizer.rank}", [line["learning_rate"] for line in trainer.state.log_history if "loss" in line])
"""


def test_each_copy_of_a_trainer_logs_the_rates_of_its_own_schedule(store: kvps.Store, tmp_path: Path) -> None:
    """That of the second one was 0 in each line."""
    environment = os.environ | {"KVPS_REDIS_URL": store.url}
    command = [*KVPS, "run", "-w", "2", "--job", "logs", "--", sys.executable, "-c", LOGS]
    done = run(command, popen=LibraryPopen, env=environment, cwd=tmp_path)
    rates = dict(re.findall(r"rates (\d) (.*)", done.stdout))
    assert rates["0"] == rates["1"], done.stderr
    assert [plan.lr for plan in (commit.plan for commit in store.job("logs").log())] == [
        pytest.approx(0.1 * factor) for factor in (0, 1 / 3, 2 / 3, 1, 2 / 3, 1 / 3)
    ]


FORMS = """
import dataclasses, sys, typing, jax, kvps, kvps.jax
from helpers.harness import aggregating
from jax import numpy as jnp

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: jax.Array
    b: typing.Any

tree = {"net": [Layer(jnp.ones((2, 3)), None), (jnp.zeros(3, jnp.bfloat16), {"k": jnp.ones(())})]}
with kvps.connect(sys.argv[1]) as store:
    job = store.create_job("job", kvps.jax.parameters(tree), optimizer=kvps.SGD(lr=1.0))
    with aggregating(job), kvps.jax.join(job, tree) as worker:
        first = worker.pull()
        worker.step(jax.tree.map(jnp.ones_like, first), weight=None, loss=jnp.ones(()))
        second = worker.pull()
        for pulled, less in ((first, 0), (second, 1)):  # the first one is still what it was
            assert jax.tree.structure(pulled) == jax.tree.structure(tree)
            for mine, own in zip(jax.tree.leaves(pulled), jax.tree.leaves(tree), strict=True):
                assert mine.dtype == own.dtype and (mine == own - less).all()
    version, loaded = kvps.jax.load(job, tree)
    assert (version, loaded["net"][0].w[0, 0]) == (1, 0.0)
    print([*job.snapshot()[1]])
for wrong in ({"a": jnp.arange(2)}, {"a": 1.0}, {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}):
    try:
        kvps.jax.parameters(wrong)
    except kvps.LayoutMismatch as error:
        print(str(error).partition(":")[0])
"""


def test_a_pytree_comes_back_in_its_form(store: kvps.Store) -> None:
    done = run([sys.executable, "-c", FORMS, store.url], popen=LibraryPopen)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['net/0/w', 'net/1/0', 'net/1/1/k']",
        "leaf 'a' is int32",
        "leaf 'a' is float",
        "two leaves are called 'a/b'",
    ]


def test_the_script_of_the_jax_page(home: Path) -> None:
    (script,) = python_in("docs/jax.md")
    done = run([sys.executable, "-c", script], popen=LibraryPopen)
    assert done.returncode == 0, done.stderr
    version, loss = done.stdout.rstrip().split(": loss ")
    assert (version, float(loss) < 0.5) == ("version 50", True)  # ln 5 at first
