"""`kvps run` of a script that trains several jobs: folds, one after another, or two models at once. Real processes and
real signals; each job ends with the bits that it has if it is the only one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.arrays import assert_same_bits
from helpers.commands import KVPS, kvps_run, refused, run
from helpers.harness import check_chain, model, plain_loop
from helpers.torch_process import TorchPopen
from helpers.waiting import awaited_job, eventually

import kvps
from kvps.history.checkpoint_directory import newest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands

ROUNDS = 12
TWO = ["-w", "2", "--min-workers", "2"]
SCRIPT = f"""
import os, pathlib, sys, time
import kvps
from helpers.harness import gradient, model

def once(what):
    mark = pathlib.Path(what)
    return what in sys.argv and not mark.exists() and not mark.touch()

def die():
    os.kill(os.getpid(), 9)

for fold in range(2):
    with kvps.from_env() as worker:
        me = f"{{worker.rank}}-in-{{fold}}"
        if once(f"before-{{me}}"):
            die()
        job = worker.create_job(model(fold + worker.rank), optimizer=kvps.SGD(lr=0.05))
        with job.join(worker.id) as session:
            while session.clock < {ROUNDS}:
                params = session.pull()
                if session.clock == 5:
                    if once(f"killed-{{me}}"):
                        die()
                    if once(f"failed-{{me}}"):
                        raise RuntimeError("unlucky")
                    if once(f"stopped-{{me}}"):
                        job.stop("enough")
                    while once(f"waits-{{me}}") or (pathlib.Path(f"waits-{{me}}").exists() and not
                            pathlib.Path("hurry").exists()):
                        time.sleep(0.05)
                session.push(gradient(params, session.rank, session.clock))
        print(job.name, session.clock, flush=True)
"""


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path) -> Path:
    """The user's directory, with a script in it."""
    (tmp_path / "folds.py").write_text(SCRIPT)
    return tmp_path


def script(*words: str) -> list[str]:
    return ["--", sys.executable, "folds.py", *words]


def check_folds(store: kvps.Store, *folds: int) -> None:
    for fold in folds:
        job = store.job(f"folds.{fold + 1}" if fold else "folds")
        assert job.state().clock == {"w0": ROUNDS, "w1": ROUNDS}
        assert_same_bits(job.snapshot()[1], plain_loop(model(fold), 2, ROUNDS, 0.05))
        assert check_chain(job) == ROUNDS


def test_each_fold_is_a_job_of_its_own_also_for_copies_that_are_killed(lasting: kvps.Store, here: Path) -> None:
    """One in the middle of the second fold, and rank 0 between the two: both are started again, and pass through."""
    done = kvps_run("run", *TWO, *script("killed-1-in-1", "before-0-in-1"))
    assert done.returncode == 0, done.stderr
    check_folds(lasting, 0, 1)
    ends = [f"{rank}: {name} {ROUNDS}" for rank in ("w0", "w1") for name in ("folds", "folds.2")]
    assert set(done.stdout.splitlines()) == set(ends)
    passes = re.findall(r"^w\d: worker (w\d): job folds is finished: no step of it is done again$", done.stderr, re.M)
    assert sorted(passes) == ["w0", "w1"], done.stderr
    for title in ("", "job folds.2: "):
        assert f"\n{title}24 contributions in 12 versions, " in done.stderr
    members = [lasting.job(name).state().members for name in ("folds", "folds.2")]
    assert [each["w1"].incarnation[0] + each["w0"].incarnation[0] for each in members] == ["11", "21"]


def test_a_run_that_is_stopped_in_its_second_fold_goes_on_there(lasting: kvps.Store, here: Path, start: Any) -> None:
    """From its files, in a job on the server; and then nothing is left to train."""
    kept = ["--checkpoints", "kept", "--resume", *TWO]
    running = start("run", *kept, *script("waits-1-in-1"))
    assert eventually((here / "waits-1-in-1").exists)
    running.process.send_signal(signal.SIGTERM)
    second = awaited_job(lasting, "folds.2")
    assert eventually(lambda: second.state().run.state == "suspended")
    (here / "hurry").touch()
    rest = running.output(os.EX_TEMPFAIL)
    assert re.search(r"^stopped at version \d+ of job folds.2, can be resumed: the same command goes on$", rest, re.M)
    for name in ("folds", "folds.2"):
        lasting.remove_job(name)
    done = kvps_run("run", *kept, *script())
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^job folds: finished at version {ROUNDS} .*: nothing is left to train$", done.stderr, re.M)
    assert re.search(r"^job folds.2: goes on at version \d+, from ", done.stderr, re.M)
    for fold, name in enumerate(("folds", "folds.2")):
        assert_same_bits(lasting.job(name).snapshot()[1], plain_loop(model(fold), 2, ROUNDS, 0.05))
    found = newest(Path("kept"), "folds.2")
    assert found
    assert (found.checkpoint.version, found.checkpoint.finished) == (ROUNDS, True)
    again = kvps_run("run", *kept, *script())
    assert (again.returncode, again.stderr.count("nothing is left to train")) == (0, 2), again.stderr
    assert "contributions in" not in again.stderr


def test_a_fold_that_fails_ends_the_run_and_is_resumed(lasting: kvps.Store, here: Path) -> None:
    """The other copy ends that fold, and is told that the next one does not come."""
    line = ["run", "-w", "2", "--redis", lasting.url, "--resume"]
    done = kvps_run(*line, *script("failed-0-in-0"))
    assert done.returncode == 1
    told = "rank 0 has ended and made no job 'folds.2': all copies of a script must make the same"
    assert f"w1: kvps: error: {told} (folds.py, line " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvps: error: job folds: all its workers failed")
    again = kvps_run(*line, *script())
    assert again.returncode == 0, again.stderr
    assert lasting.job("folds").state().clock == {"w0": ROUNDS, "w1": ROUNDS}
    check_folds(lasting, 1)


def test_a_fold_that_is_stopped_is_finished_for_good(lasting: kvps.Store, here: Path) -> None:
    """Also for a copy that is killed in the next one, and for a run that is resumed from files."""
    kept = ["--checkpoints", "kept", "--resume", *TWO]
    done = kvps_run("run", *kept, *script("stopped-1-in-0", "killed-0-in-1"))
    assert done.returncode == 0, done.stderr
    check_folds(lasting, 1)
    state = lasting.job("folds").state()
    assert (state.run.state, state.version < ROUNDS) == ("stopped", True)
    assert "worker w0: job folds is finished" in done.stderr
    lasting.remove_job("folds")
    lasting.remove_job("folds.2")
    over = kvps_run("run", *kept, *script())
    assert (over.returncode, over.stderr.count("nothing is left to train"), lasting.jobs()) == (0, 2, [])
    for note in Path("kept").glob("*.ended"):  # as if it had been killed behind its second fold
        note.unlink()
    assert kvps_run("run", *kept, *script()).returncode == 0
    again = lasting.job("folds").state()
    assert (again.run.state, again.version) == ("stopped", state.version)


def test_a_run_of_folds_takes_no_name_of_another_and_none_that_is_too_long(lasting: kvps.Store) -> None:
    lasting.create_job("folds.2", model())
    done = kvps_run("run", "-w", "2", *script())
    assert done.returncode == 0, done.stderr
    assert lasting.jobs() == ["folds-2", "folds-2.2", "folds.2"]
    assert "job 'folds.2' exists" in kvps_run("run", "--job", "folds", *script()).stderr
    assert "too long for a run, whose later jobs" in refused("run", "--job", "n" * 61, *script())


GAN = """
import os, pathlib, sys, torch
from torch import nn
import kvps.torch

torch.manual_seed(1)
generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
sgd = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (generator, critic)]
with kvps.torch.Optimizer(sgd[0], generator) as g:
    if "nameless" in sys.argv:
        kvps.torch.Optimizer(sgd[1], critic)
    with kvps.torch.Optimizer(sgd[1], critic, name="critic") as c:
        while g.worker.session.clock < 12:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(g.worker.session.clock))
            if c.worker.session.clock == g.worker.session.clock:
                c.zero_grad()
                critic(generator(x).detach()).mean().backward()
                c.step()
            mark = pathlib.Path("killed")
            if g.rank == 1 and g.worker.session.clock == 5 and "kill" in sys.argv and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), 9)
            g.zero_grad()
            (-critic(generator(x)).mean()).backward()
            g.step()
        print("at", g.job.name, g.worker.session.clock, c.job.name, c.worker.session.clock, flush=True)
"""


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run copies of a script of PyTorch."""
    return run([*KVPS, "run", *words], popen=TorchPopen)


def test_two_models_at_once_are_two_jobs_by_name(lasting: kvps.Store, here: Path) -> None:
    (here / "gan.py").write_text(GAN)
    command = ["--min-workers", "2", "--", sys.executable, "gan.py"]
    for job, words in (("calm", []), ("hit", ["kill"])):
        done = _run("-w", "2", "--job", job, *command, *words)
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.splitlines()) == {f"w{rank}: at {job} 12 {job}.critic 12" for rank in range(2)}
    assert (here / "killed").exists()
    for which in ("", ".critic"):
        assert_same_bits(lasting.job(f"calm{which}").snapshot()[1], lasting.job(f"hit{which}").snapshot()[1])
    done = _run("-w", "1", *command[2:], "nameless")
    assert done.returncode == 1
    assert "kvps: error: this script trains job 'gan' already: close its optimizer" in done.stderr


UNITS = """
import os, pathlib, sys, torch
from torch import nn
import kvps.torch

x = torch.randn(48, 10, generator=torch.Generator().manual_seed(0))
y = x[:, :3].argmax(1)
data = torch.utils.data.TensorDataset(x, y)
for fold in range(2):
    torch.manual_seed(fold)
    net = nn.Linear(10, 3)

    @kvps.torch.evaluates(net)
    def evaluate(model, job):
        print("evaluates", job.name, fold, flush=True)
        return {"fold": fold}

    settings = {"samples": 48, "batch_size": 4, "epochs": 2, "units_per_round": 4, "seed": fold}
    with kvps.torch.Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, **settings) as optimizer:
        for images, labels in optimizer.worker.batches(data):
            mark = pathlib.Path("killed")
            if fold == 1 and "kill" in sys.argv and os.environ["KVPS_RANK"] == "0" and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), 9)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
        optimizer.finish()
    print(fold, "ends with", net.weight.double().sum().item(), flush=True)
"""


def test_folds_of_units_have_the_same_bits_with_any_copies_and_each_its_own_evaluations(
    lasting: kvps.Store, here: Path
) -> None:
    (here / "units.py").write_text(UNITS)
    command = ["--", sys.executable, "units.py"]
    ends = {}
    for job, options, words in (("one", ["-w", "1"], []), ("more", ["-w", "1:3"], ["kill"])):
        evaluated = ["--eval-every", "1", "--keep-best", "fold:max", "--checkpoints", job]
        done = _run("--job", job, *options, *evaluated, *command, *words)
        assert done.returncode == 0, done.stderr
        for fold, name in enumerate((job, f"{job}.2")):
            opened = lasting.job(name)
            ends[name] = opened.snapshot()[1]
            evaluation = opened.evaluation()
            assert evaluation
            assert (evaluation.version, evaluation.figures) == (6, {"fold": fold})
            assert f"best fold:max of job {name}: version " in done.stderr
        assert "evaluator: evaluates" in done.stdout
        assert "evaluator: 1 ends" not in done.stdout, "it ends with the last job's last version"
        ended = re.findall(r"^(?:w\d|evaluator): (\d ends with .*)$", done.stdout, re.M)
        assert len(set(ended)) == 2, f"also a model that passes through is filled: {ended}"
    assert_same_bits(ends["one"], ends["more"])
    assert_same_bits(ends["one.2"], ends["more.2"])
