"""What a run with --resume goes on from, and which workers the job then waits for. No process is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.arrays import assert_same_bits
from helpers.checkpoints import saved
from helpers.harness import aggregating, await_version, gradient, model
from kvps_cli.train.resume import Launch, origin

import kvps
from kvps.config import JobConfig, Metadata
from kvps.machine import launcher
from kvps.run_jobs import Run
from kvps.store import Store


def launch(workers: int, directory: Path | None = None) -> Launch:
    return Launch(launcher.this_process("kvps run", workers), workers, workers, {}, directory, 0.1, quiet=True)


def places(job: kvps.Job) -> dict[str, str]:
    """What the job thinks of each worker."""
    return {m.worker: "awaited" if m.awaited else m.state for m in job.state().members.values()}


@pytest.mark.parametrize("per_round", [0, 3])
def test_nobody_waits_for_workers_that_do_not_come_where_others_may_do_their_units(
    store: Store, tmp_path: Path, per_round: int
) -> None:
    job = store.create_job("job", model(), workers=3, units=9, units_per_round=per_round)
    sessions = [job.join(f"w{rank}") for rank in range(3)]
    for session in sessions:
        session.next_unit()
    saved(job, tmp_path)
    store.remove_job("job")
    begin = origin(store, "job", launch(2, tmp_path))
    assert begin.lines == [f"job job: goes on at version 0, from {next(tmp_path.glob('*.safetensors'))}"]
    (again,) = begin.run.jobs(store)
    assert again.config.workers == 2
    kept = "gone" if per_round else "awaited"
    assert places(again) == {"w0": kept, "w1": kept, "w2": "gone"}
    assert again.config.metadata.launched_by == launch(2).launched_by
    for session in sessions:
        with pytest.raises(kvps.JobNotFound):
            session.leave()


def ended(store: Store, workers: int) -> tuple[kvps.Job, list[kvps.Session]]:
    """A job of a run that has ended, and the sessions of its copies."""
    gone = json.loads(launcher.this_process("kvps run", workers)) | {"pid": 2**22 + 1}
    job = store.create_job(
        "job", model(), config=JobConfig(workers=workers, metadata=Metadata(launched_by=json.dumps(gone)))
    )
    first = store.client.call("HGET", job.access.keys.config, "launched_by")
    store.client.call("HSET", job.access.keys.config, "launched_by", "")  # so that this process may join
    sessions = [store.job("job").join(f"w{rank}") for rank in range(workers)]
    store.client.call("HSET", job.access.keys.config, "launched_by", first)
    return job, sessions


def test_workers_that_left_because_the_job_was_suspended_keep_their_places(store: Store, tmp_path: Path) -> None:
    job, sessions = ended(store, 2)
    job.suspend()
    for session in sessions:
        session.leave(finished=False)
    path = saved(job, tmp_path)
    origin(store, "job", launch(2))
    assert places(job) == {"w0": "awaited", "w1": "awaited"}
    assert job.state().run.state == "running"
    again = store.restore_job(kvps.Checkpoint.load(path), "again")
    assert places(again) == {"w0": "awaited", "w1": "awaited"}


@pytest.mark.parametrize("where", ["the server", "a checkpoint"])
def test_every_copy_that_has_work_left_is_waited_for_however_it_ended(store: Store, tmp_path: Path, where: str) -> None:
    """All of them are started again. The first that is back would train alone: in BSP, to other weights."""
    job, (failed, killed, finished) = ended(store, 3)
    failed.leave(finished=False)
    job.evict(job.state().members[killed.worker])
    finished.leave()
    if where == "a checkpoint":
        saved(job, tmp_path)
        store.remove_job("job")
    begin = origin(store, "job", launch(3, tmp_path))
    (again,) = begin.run.jobs(store)
    assert places(again) == {"w0": "awaited", "w1": "awaited", "w2": "gone"}


@pytest.mark.parametrize("where", ["the server", "a checkpoint"])
def test_a_run_that_was_stopped_ends_with_the_round_of_the_stop(store: Store, tmp_path: Path, where: str) -> None:
    """Its copies were killed before they had done that round."""
    job, sessions = ended(store, 2)
    pushing = sessions[0]
    pushing.push(pushing.pull())
    stopped = job.stop("good enough")
    for session in sessions:
        job.evict(job.state().members[session.worker])
    if where == "a checkpoint":
        saved(job, tmp_path)
        store.remove_job("job")
    begin = origin(store, "job", launch(2, tmp_path))
    (again,), (line,) = begin.run.jobs(store), begin.lines
    assert line.endswith("; stopped: good enough; all workers end with round 1")
    assert again.state().run == stopped
    again.resume()
    assert again.state().run.state == "running"


def test_a_job_that_others_train_is_not_taken(store: Store) -> None:
    task = store.create_job("task", model(), task="digits", batch_size=8, epochs=1)
    with pytest.raises(kvps.UsageError, match="trains the task digits: kvps worker --job task goes on with it"):
        origin(store, task.name, launch(1))
    by_hand = store.create_job("by-hand", model(), workers=1, worker_timeout_ms=200)
    with by_hand.join("w0"):
        with pytest.raises(kvps.UsageError, match="w0 of processes that kvps run did not start are at work: wait"):
            origin(store, by_hand.name, launch(1))
        assert by_hand.state().members["w0"].active


def test_a_job_with_a_task_is_taken_if_a_run_launched_it(store: Store) -> None:
    gone = json.loads(launcher.this_process("kvps run", 2)) | {"pid": 2**22 + 1}
    noted = Metadata(task="digits", launched_by=json.dumps(gone))
    store.create_job("job", model(), config=JobConfig(batch_size=8, epochs=1, metadata=noted))
    begin = origin(store, "job", launch(1))
    assert begin.lines == ["job job: goes on at version 0, from the job on the server"]


def test_all_jobs_of_a_run_are_found_on_the_server_or_in_files_and_those_of_others_are_not(
    store: Store, tmp_path: Path
) -> None:
    """The first one is finished, the third was only begun, and another run has a name that looks like one of its."""
    gone = json.loads(launcher.this_process("kvps run", 1, "run")) | {"pid": 2**22 + 1}
    run = Run("run", "0000000a")
    for which, its in (("", gone), ("2", gone), ("critic", gone), ("v2", gone | {"run": "run.v2"})):
        name = run.job_name(which)
        job = store.create_job(name, model(), workers=1, id=run.job_id(name))
        with aggregating(job):
            session = job.join("w0")
            session.push(gradient(session.pull(), 0, 0))
            await_version(job, 1)
            session.leave(finished=which == "")
        store.client.call("HSET", job.access.keys.config, "launched_by", json.dumps(its))
        saved(store.job(name), tmp_path)
    end = store.job("run").snapshot()[1]
    for name in ("run", "run.critic", "run.v2"):
        store.remove_job(name)
    begin = origin(store, "run", launch(1, tmp_path))
    assert [line.partition(", from ")[0].partition(" in ")[0] for line in begin.lines] == [
        "job run: finished at version 1",
        "job run.2: goes on at version 1",
        "job run.critic: goes on at version 1",
    ]
    assert (begin.run, begin.done) == (run, {"run"})
    assert [job.name for job in run.jobs(store)] == ["run", "run.2", "run.critic"]
    assert_same_bits(store.job("run").snapshot()[1], end)
    store.remove_job("run.2")
    store.create_job("run.2", model(), config=JobConfig(metadata=Metadata(launched_by=json.dumps(gone))))
    with pytest.raises(kvps.UsageError, match="trains job 'run'"):
        origin(store, "run", launch(1))
    for job in run.jobs(store):
        store.client.call("HSET", job.access.keys.config, "launched_by", json.dumps(gone))
    with pytest.raises(kvps.UsageError, match=r"job 'run.2' is of another run than 'run': kvps rm run.2"):
        origin(store, "run", launch(1))
