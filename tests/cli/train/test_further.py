"""More epochs for a job that is finished: the same line of `kvps run --resume`, whose script now asks for more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.arrays import assert_same_bits
from helpers.commands import kvps_run
from helpers.harness import ends_of_units, model, plain_loop

import kvps
from kvps.history.events import Event
from kvps.history.log_file import LogFile

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands

SAMPLES = """
import sys
import kvps
from helpers.harness import gradient, model

samples, epochs = map(int, sys.argv[1:])
with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05), samples=samples, batch_size=4, epochs=epochs)
    with job.join(worker.id) as session:
        while (unit := session.next_unit()) is not None:
            session.push(gradient(session.pull(), 0, unit))
            if session.rank == 0 and epochs == 9:
                job.stop("enough")
"""
STATIC = """
import sys
import kvps
from helpers.harness import gradient, model

rounds = int(sys.argv[1])
with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05), rounds=rounds)
    with job.join(worker.id) as session:
        while session.clock < rounds:
            session.push(gradient(session.pull(), session.rank, session.clock))
"""


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "samples.py").write_text(SAMPLES)
    (tmp_path / "static.py").write_text(STATIC)


def run(store: kvps.Store, script: str, *words: int, code: int = 0, kept: bool = True) -> str:
    """Run the line, which resumes what there is. Return what it said."""
    keeps = ["--checkpoints", "kept"] if kept else []
    line = ["run", "-w", "2", "--redis", store.url, *keeps, "--resume", "--", sys.executable, f"{script}.py"]
    done = kvps_run(*line, *map(str, words))
    assert done.returncode == code, done.stderr
    return str(done.stderr)


def weights_after(epochs: int) -> dict[str, object]:
    return ends_of_units(samples=16, batch_size=4, epochs=epochs)


def test_more_epochs_go_on_from_the_last_version_and_nothing_else_does(lasting: kvps.Store) -> None:
    """On the server, and from the last checkpoint; both stretches are proved as one log."""
    run(lasting, "samples", 16, 3)
    before = lasting.job("samples").state()
    assert "nothing is left to train" in run(lasting, "samples", 16, 3)
    assert "finished with epochs 3, and 2 is less: nothing was changed" in run(lasting, "samples", 16, 2, code=2)
    assert "samples 16, not 20" in run(lasting, "samples", 20, 6, code=2)
    assert "give --checkpoints DIR" in run(lasting, "samples", 16, 6, code=2, kept=False)
    assert lasting.job("samples").state() == before, "nothing was changed"
    assert "with epochs 3 to 6, units 12 to 24" in run(lasting, "samples", 16, 6)
    assert_same_bits(lasting.job("samples").snapshot()[1], weights_after(6))
    lasting.remove_job("samples")
    assert "with epochs 6 to 8, units 24 to 32" in run(lasting, "samples", 16, 8)
    assert_same_bits(lasting.job("samples").snapshot()[1], weights_after(8))
    proof = kvps_run("verify", "samples", "--checkpoints", "kept", "--redis", lasting.url)
    assert (proof.returncode, proof.stdout.splitlines()[0][:42]) == (0, "chain       8 commits, 32 contributions: u")
    restored = LogFile(Path("kept"), "samples", lasting.job("samples").id).first()
    assert restored
    assert Event.of(restored).facts["settings"] == {"epochs": ["6", "8"], "units": ["24", "32"]}


def test_a_job_that_was_stopped_stays_so_unless_more_is_asked_for(lasting: kvps.Store) -> None:
    run(lasting, "samples", 16, 9)
    version = lasting.job("samples").state().version
    assert version < 9
    assert "nothing is left to train" in run(lasting, "samples", 16, 9)
    assert lasting.job("samples").state().version == version
    assert "with epochs 9 to 10" in run(lasting, "samples", 16, 10)
    assert_same_bits(lasting.job("samples").snapshot()[1], weights_after(10))


def test_workers_with_data_of_their_own_do_more_rounds_together(lasting: kvps.Store) -> None:
    run(lasting, "static", 5)
    assert "with rounds 5 to 9" in run(lasting, "static", 9)
    job = lasting.job("static")
    assert (job.state().version, job.state().clock) == (9, {"w0": 9, "w1": 9})
    assert_same_bits(job.snapshot()[1], plain_loop(model(), 2, 9, 0.05))
