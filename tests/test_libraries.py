"""The examples with other libraries, trained by two copies under `kvps run`, held against loops of PyTorch alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import kvps_run
from helpers.pages import python_in
from helpers.paths import ROOT, TESTS
from helpers.servers import free_port

import kvps

pytestmark = pytest.mark.slow  # each process imports a large library
Weights = dict[str, np.ndarray]


@pytest.fixture
def reference(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "reference.npz"


def by_kvps(store: kvps.Store, example: str, *arguments: str) -> tuple[str, Weights]:
    """Run an example as two copies; return what it printed, and the weights of the job."""
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *arguments]
    name = "-".join([example, *arguments])
    done = kvps_run("run", "-w", "2", "--job", name, "--", *command, KVPS_REDIS_URL=store.url)
    assert done.returncode == 0, done.stdout + done.stderr
    job = store.job(name)
    assert job.state().finished(job.config)
    return done.stdout, job.snapshot()[1]


def by_torch(library: str, file: Path, processes: int = 1) -> Weights:
    """Return the weights of helpers/libraries.py, run as so many processes of torchrun."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(TESTS)}
    command = [sys.executable, str(TESTS / "helpers" / "libraries.py"), library, str(file)]
    with ExitStack() as stack:
        ranks = []
        for rank in map(str, range(processes)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(processes)} if processes > 1 else {}
            environment = os.environ | address | place
            popen = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
            ranks.append(stack.enter_context(popen))
            stack.callback(popen.kill)
        for process in ranks:
            _, said = process.communicate(timeout=300)
            assert process.returncode == 0, said.decode()
    return dict(np.load(file))


def distance(one: Weights, other: Weights, come: np.ndarray) -> float:
    """Return the Euclidean distance of two runs' weights, over how far they have come."""
    assert one.keys() == other.keys()
    return float(np.sqrt(sum(np.sum((one[name] - other[name]) ** 2) for name in other)) / come)


def test_the_trainer_of_transformers_ends_as_with_distributed_data_parallel(
    store: kvps.Store, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart by the rounding that 40 steps of AdamW make of float32 sums in another order: about 3e-5 of the way. The
    biases of keys are left out: softmax does not see them, so that all of their gradient is rounding, and AdamW makes
    whole steps of it."""
    monkeypatch.chdir(tmp_path)
    printed, weights = by_kvps(store, "trainer_gpt2")
    assert "version 40" in printed
    of_ddp = by_torch("trainer", reference, processes=2)
    loss, come = of_ddp.pop("loss"), of_ddp.pop("come")
    losses = [float(loss) for loss in re.findall(r"'train_loss': '([\d.]+)'", printed)]
    assert len(losses) == 2
    assert sum(losses) / 2 == pytest.approx(float(loss), abs=0.01)  # each is printed with four digits
    for block in range(2):
        for end in (weights, of_ddp):
            bias = end[f"transformer.h.{block}.attn.c_attn.bias"] = end[
                f"transformer.h.{block}.attn.c_attn.bias"
            ].copy()
            bias[64:128] = 0
    assert distance(weights, of_ddp, come) < 1e-4


@pytest.mark.parametrize("runs", [["lightning_digits", "lightning_digits manual"], ["accelerate_digits"]])
def test_a_loop_of_a_library_ends_as_a_plain_loop(store: kvps.Store, reference: Path, runs: list[str]) -> None:
    """Apart by some roundings, about 2e-7 of the way."""
    of_loop = by_torch(runs[0].partition("_")[0], reference)
    come = of_loop.pop("come")
    for run in runs:
        printed, weights = by_kvps(store, *run.split())
        assert "version 48" in printed
        assert distance(weights, of_loop, come) < 1e-5


@pytest.mark.parametrize(("arguments", "version"), [("", 60), (" local", 15)])
def test_jax_with_optax_ends_as_optax_alone(store: kvps.Store, reference: Path, arguments: str, version: int) -> None:
    """The nested parameters come back in their form; apart by the roundings of AdamW, about 4e-6 of the way."""
    of_optax = by_torch("jax" + arguments.replace(" ", "-"), reference)
    come = of_optax.pop("come")
    printed, weights = by_kvps(store, *f"jax_optax{arguments}".split())
    assert f"version {version}" in printed
    assert [*weights] == ["layers/0/b", "layers/0/w", "layers/1/b", "layers/1/w", "scale"]
    assert distance(weights, of_optax, come) < 5e-5


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
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", FORMS, store.url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['net/0/w', 'net/1/0', 'net/1/1/k']",
        "leaf 'a' is int32",
        "leaf 'a' is float",
        "two leaves are called 'a/b'",
    ]


def test_the_script_of_the_jax_page(home: Path) -> None:
    (script,) = python_in("docs/jax.md")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, loss = done.stdout.rstrip().split(": loss ")
    assert (version, float(loss) < 0.5) == ("version 50", True)  # ln 5 at first


@pytest.mark.parametrize(("example", "lines"), [("trainer_gpt2", 4), ("lightning_digits", 3), ("accelerate_digits", 3)])
def test_the_lines_of_an_example_that_are_kvpss(example: str, lines: int) -> None:
    """Those that name kvps, or what its optimizer has; less the line that only prints."""
    code = (ROOT / "examples" / f"{example}.py").read_text().partition('"""\n\n')[2]
    own = re.findall(r"^.*(?:kvps|optimizer\.rank, len|shared\.rank, len|=\(optimizer, ).*$", code, re.MULTILINE)
    assert len(own) == lines, own
