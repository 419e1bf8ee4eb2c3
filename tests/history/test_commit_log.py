"""Checkpoints while a job goes on: the log moves with them, is one chain still, and proves what it proved before."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
from helpers.checkpoints import PATIENT, ROUNDS, STOP, train_to
from helpers.faults import MortalServer
from helpers.harness import aggregating, await_version, check_chain, gradient, log_entries, model, work_on
from helpers.servers import private_directory
from helpers.waiting import eventually
from kvps_aggregator.checkpoints import Checkpoints, KeptLog
from kvps_aggregator.shard import mirror
from kvps_cli.prove.verify import proof_of
from kvps_monitor.loggers.rows import RowReader
from kvps_workers import load_task
from kvps_workers.training_loop import train

import kvps
from kvps.device.base import open_device
from kvps.history import log_file
from kvps.history.checkpoint import Checkpoint
from kvps.history.commit_log import Log, keep, move
from kvps.history.events import EventLog
from kvps.history.log_file import LogFile
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.store import Store


@pytest.mark.contract
def test_the_log_moves_and_is_one_chain_across_two_checkpoints_and_restores(store: Store, tmp_path: Path) -> None:
    job = store.create_job("job", model(), workers=2, shards=2, optimizer=kvps.Adam(), **PATIENT)
    every = Checkpoints(tmp_path, 4, keep=2)
    train_to(job, 6, checkpoints=every)
    assert job.state().moved == 4
    first = proof_of(job)[1]
    assert (first.since, first.commits, first.differs) == (3, 6, ""), "what is left in Redis is one chain"
    train_to(job, STOP, checkpoints=every)
    assert [c.version for c in job.log()] == [8, 9]
    assert check_chain(job, tmp_path) == STOP
    entries = list(LogFile(tmp_path, "job", job.state().id).entries()) + list(log_entries(job))
    begin_ms, end_ms = (int(id.partition("-")[0]) for id in (entries[1][0], entries[-1][0]))
    took = LogStream(job.access).training_seconds()
    assert took == pytest.approx((end_ms - begin_ms) / 1000, abs=0.2), "from its first join"
    assert Log(LogStream(job.access), job.state(), tmp_path).begin.version == 0
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [
        f"job.{job.state().id}-{version:08d}.safetensors" for version in (4, 8)
    ]
    proof = proof_of(job, checkpoints=tmp_path)[1]
    assert (proof.since, proof.commits, proof.contributions, proof.differs) == (0, STOP, 2 * STOP, "")
    # From 8 on a restored job goes another way than the first, and one restored from that goes on.
    jobs, found = [job], Checkpoint.load(tmp_path / f"job.{job.state().id}-00000008.safetensors")
    for number, rounds in ((2, 14), (3, 21)):
        again = store.restore_job(found, f"job{number}", number)
        assert check_chain(again, tmp_path) == found.version
        train_to(again, rounds, checkpoints=every)
        proof = proof_of(again, checkpoints=tmp_path)[1]
        assert (proof.since, proof.commits, proof.contributions, proof.differs) == (0, rounds, 2 * rounds, "")
        assert check_chain(again) == rounds, "what is left in Redis is a chain too"
        jobs.append(again)
        found = Checkpoint.load(sorted(tmp_path.glob(f"job{number}.*.safetensors"))[-1])
    LogFile(tmp_path, "job", job.state().id).path.unlink()
    assert Log(LogStream(jobs[2].access), jobs[2].state(), tmp_path).begin.version == 8, "as far back as it is there"
    LogFile(tmp_path, "job3", jobs[2].state().id).path.write_bytes(b"{}\n")
    with pytest.raises(kvps.CorruptData, match=r"job3\.\w+\.log\.jsonl is damaged"):
        check_chain(jobs[2], tmp_path)


def test_a_run_has_its_length_though_the_clock_was_set_back(store: Store) -> None:
    """From then on all ids have one time, because ids never go back."""
    job = store.create_job("job", model(), workers=1)
    with aggregating(job):
        work_on(job, "w0", 3)
        await_version(job, 3)
    keys, client, seconds = job.access.keys, job.access.client, LogStream(job.access).training_seconds()
    entries = client.call("XRANGE", keys.commits, "-", "+")
    client.call("DEL", keys.commits)
    for number, (_, fields) in enumerate(entries, 1):
        client.call("XADD", keys.commits, f"9999999999999-{number}", *chain(*fields.items()))
    assert LogStream(job.access).training_seconds() == seconds > 0


def test_a_restored_job_is_replayed_from_its_checkpoint(store: Store, tmp_path: Path) -> None:
    """And from version 0 where the logs of both are there, though the number of shards has changed."""
    settings: dict[str, Any] = {"workers": 2, "task": "digits", "batch_size": 96, "staleness": 1}
    optimizer = kvps.Adam(kvps.schedules.CosineAnnealingLR(0.01, over=30))
    job = store.create_job("digits", load_task("digits").parameters(0), epochs=4, optimizer=optimizer, **settings)
    every = Checkpoints(tmp_path, 7, keep=99)
    _run_task(job, every)
    paths = sorted(tmp_path.glob("digits.*.safetensors"))  # the first and the last are sure to be there
    restored = store.restore_job(Checkpoint.load(paths[0]), "again", 2)
    begin = restored.state().begin
    _run_task(restored, every)
    assert restored.state().clock == job.state().clock
    start = Checkpoint.load(paths[0])
    _, proof = proof_of(restored, None, None, start)
    assert proof.since == restored.state().moved - 1
    assert f"version {start.version}: the log begins only after version {proof.since}" in proof.differs
    state, proof = proof_of(restored, None, tmp_path, start)
    assert (proof.since, proof.replayed_since, proof.differs) == (0, begin.version, "")
    assert proof.replayed == state.version - begin.version
    state, proof = proof_of(restored, None, tmp_path)
    assert (proof.replayed, proof.differs) == (state.version, ""), "from version 0, across the restore"
    wrong = Checkpoint.load(paths[-1])
    assert "is not of this log" in proof_of(restored, None, tmp_path, wrong)[1].differs


def _run_task(job: Job, checkpoints: Checkpoints | None = None) -> None:
    with aggregating(job, checkpoints=checkpoints), ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(train, job, open_device(None), f"w{i}") for i in range(2)]:
            done.result()
        assert eventually(lambda: job.state().finished(job.config))


def test_a_log_with_a_long_tail_is_not_read_to_its_end(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "MOST_LINE", 1 << 20)
    job = store.create_job("job", model(), **PATIENT)
    train_to(job, 3, 1)
    state = job.state()
    keep(LogStream(job.access), tmp_path, state, 2)
    file = LogFile(tmp_path, "job", state.id)
    os.truncate(file.path, 8 << 20)
    for read in (lambda: list(file.entries()), lambda: keep(LogStream(job.access), tmp_path, state, 3)):
        with pytest.raises(kvps.CorruptData, match=r"job\.\w+\.log\.jsonl is damaged: a line of it has more than 1 MB"):
            read()


@pytest.mark.contract
def test_what_was_appended_and_not_trimmed_comes_once(store: Store, tmp_path: Path) -> None:
    """The writer is killed between the two, or in the middle of a line; another one goes on."""
    job = store.create_job("job", model(), **PATIENT)
    train_to(job, 5, 1)
    job.join("w0").leave()  # stands behind the commit, and is moved with the next one
    state = job.state()
    whole = list(log_entries(job))
    last = next(n for n, (_, fields) in enumerate(whole) if fields.get("version") == "5")
    file = LogFile(tmp_path, "job", state.id)
    for stream in (whole[:3], [], whole[:5]):
        file.extend(stream)
        with file.path.open("ab") as half:
            half.write(b'{"entry": "1795238263183-0", "ki')
        assert check_chain(job, tmp_path) == 5
    for _ in range(2):
        move(LogStream(job.access), job.access.scripts, tmp_path, state, 5)
        assert list(file.entries()) == whole[: last + 1]
        assert check_chain(job, tmp_path) == 5
    assert list(log_entries(job)) == whole[last:], "the last commit stays"
    job.access.client.call("HSET", job.access.keys.version, "history", "another")
    move(LogStream(job.access), job.access.scripts, tmp_path, state, 5)
    with pytest.raises(kvps.KvpsError, match="could not write"):
        move(LogStream(job.access), job.access.scripts, tmp_path / "nowhere", state, 5)


@pytest.mark.parametrize("moves", [False, True], ids=["deleted", "moved"])
@pytest.mark.parametrize("transport", ["redis", "shm"])
def test_a_log_has_the_newest_versions_and_says_what_is_gone(
    store: Store, tmp_path: Path, moves: bool, transport: Literal["redis", "shm"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "EVERY_S", 0.0)
    job = store.create_job("job", model(), transport=transport, optimizer=kvps.Adam(), **PATIENT)
    rows, start = RowReader(job, 0, checkpoints=tmp_path if moves else None), job.checkpoint()
    with aggregating(job, log=KeptLog(10, tmp_path if moves else None)):
        with job.join("w0") as session:
            for number in range(60):
                if number == 58:  # no later commit cuts the log up to what a slow mirror had not given Redis
                    assert eventually(lambda: job.access.transport.safe_version(58) == 58)
                session.push(gradient(session.pull(), 0, number))
        assert eventually(lambda: job.state().moved >= 49)
    state, kinds = job.state(), [fields["kind"] for _, fields in log_entries(job)]
    assert kinds.count("commit") == 61 - state.moved <= 12
    assert LogStream(job.access).training_seconds() > 0
    assert [e.facts["version"] for e in EventLog(job.access.client, job.access.keys).newest(0) if e.kind == "commit"]
    proof = proof_of(job)[1]
    assert (proof.since, proof.commits, proof.differs) == (state.moved - 1, 60, ""), "what is left is one chain"
    assert "the log begins only after version" in proof_of(job, start=start)[1].differs
    assert check_chain(job, tmp_path) == 60
    assert Log(LogStream(job.access), state, tmp_path).begin.version == (0 if moves else state.moved - 1)
    assert [row.version for row in rows.read()] == list(range(1 if moves else state.moved, 61))
    assert rows.missing == ([] if moves else [(1, state.moved - 1)])
    assert bool(list(tmp_path.iterdir())) == moves


def test_one_of_several_aggregators_writes(store: Store, tmp_path: Path) -> None:
    job = store.create_job("job", model(), workers=2, shards=2, optimizer=kvps.SGD(0.1, momentum=0.9), **PATIENT)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with (
        aggregating(job, [0], Checkpoints(folders[0], 5)),
        aggregating(job, [1], Checkpoints(folders[1], 5)),
        ThreadPoolExecutor(2) as pool,
    ):
        for done in [pool.submit(work_on, job, f"w{i}", ROUNDS) for i in range(2)]:
            done.result()
        assert eventually(lambda: job.state().version == ROUNDS)
    assert not list(folders[1].iterdir())
    found = [Checkpoint.load(path) for path in sorted(folders[0].glob("*.safetensors"))]
    assert [c.clock for c in found] == [{"w0": c.version, "w1": c.version} for c in found]
    assert 1 <= len(found) <= 3


def test_a_full_disk_stops_no_training(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = store.create_job("job", model(), **PATIENT)
    train_to(job, 5, 1, Checkpoints(tmp_path / "gone", 2))
    assert "job job: could not write checkpoint" in caplog.text
    assert (job.state().version, job.state().moved) == (5, 0)


@pytest.mark.parametrize("ahead_ms", [0, 3_600_000], ids=["", "clock-set-back"])
def test_entries_that_a_server_lost_are_no_part_of_the_log(tmp_path: Path, ahead_ms: int) -> None:
    """They are in the file, and Redis goes on from an earlier version, with others: under lower ids, where the clock of
    the server that wrote the lost ones was ahead."""
    with private_directory() as folder, MortalServer(folder) as mortal, kvps.connect(mortal.url) as store:
        job = store.create_job("job", model(), **PATIENT)
        train_to(job, 5, 1)
        size = mortal.log().stat().st_size
        newest = int(job.state().last_entry.partition("-")[0])
        job.access.client.call("XSETID", job.access.keys.commits, f"{newest + ahead_ms}-9")
        train_to(job, STOP, 1, checkpoints=Checkpoints(tmp_path, 4))
        mortal.kill()
        mortal.restore(mortal.files(), size)
        mortal.start()
        assert job.state().version <= 5
        with aggregating(job, checkpoints=Checkpoints(tmp_path, 4)):
            work_on(job, "w0", ROUNDS)
            assert eventually(lambda: job.state().version == ROUNDS)
        assert check_chain(job, tmp_path) == ROUNDS
        kinds = [fields["kind"] for _, fields in LogFile(tmp_path, "job", job.state().id).entries()]
        assert "recover" in kinds
        assert kinds.count("commit") > job.state().moved, "what was lost stands there too"


@pytest.mark.parametrize(("job", "id"), [("../x", "0" * 8), ("x", "/../../0"), ("x", "..\0")])
def test_no_name_of_a_job_leads_a_log_out_of_its_directory(job: str, id: str, tmp_path: Path) -> None:
    with pytest.raises(kvps.CorruptData, match="the name of a log's file"):
        LogFile(tmp_path, job, id)


def test_lines_are_read_from_the_end_whatever_their_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "_BLOCK", 8)
    for seed in range(200):
        random = Random(seed)
        lines = [b"x" * random.choice([0, 1, 6, 7, 8, 9, 30]) + b"\n" for _ in range(random.randrange(9))]
        with open(tmp_path / "log", "w+b") as file:
            file.write(b"".join(lines))
            assert list(log_file._backwards(file)) == lines[::-1]


@pytest.mark.parametrize("origins", [["job"], ["other", "job"], ["other", "other"]])
def test_a_log_that_says_that_it_continues_itself_has_an_end(store: Store, tmp_path: Path, origins: list[str]) -> None:
    """Whoever may write the log may write that."""
    job = store.create_job("job", model())
    ids, names = {"job": job.id, "other": "0badcafe"}, ["job", *origins]
    head = job.state().begin.head
    for name, of in zip(names, origins, strict=False):
        restore = {"kind": "restore", "version": "0", "head": head, "contributions": "0", "job": of, "id": ids[of]}
        LogFile(tmp_path, name, ids[name]).extend([("1-1", restore)])
    log = Log(LogStream(job.access), job.state(), tmp_path)
    assert log.begin == job.state().begin
    assert list(log.commits()) == []


def _seconds_to_extend(directory: Path, lines: int) -> float:
    """Return the processor time in which a log of so many lines is searched for an entry that it lacks."""
    log = LogFile(directory, "job", f"{lines:08x}")
    log.extend([("1-1", {"kind": "x", "plan": "x" * 1000})])
    log.path.write_bytes(log.path.read_bytes() * lines)
    began = time.process_time()
    log.extend([("9-9", {"kind": "x"})])
    return time.process_time() - began


@pytest.mark.slow
def test_the_search_of_a_log_takes_no_square_of_its_length(tmp_path: Path) -> None:
    short, long = (_seconds_to_extend(tmp_path, lines) for lines in (1_000, 32_000))
    assert long < 200 * short
