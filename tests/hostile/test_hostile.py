"""Whatever a hostile writer puts into a job's keys or files, each reader refuses it in one line, or reads on."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.harness import model
from helpers.paths import ROOT

from hostile.reach import COLUMNS, reach, user_of
from hostile.readers import READERS
from hostile.scene import SCENES, GaveUp, HurriedClient, scene
from kvps.errors import KvpsError
from kvps.protocol import acl
from kvps.store import Store

pytestmark = pytest.mark.usefixtures("forked")


def _said(module: str, *options: str, code: int = 0) -> str:
    """Return what a program prints that ends with this code. It is a process of its own, and spoils it."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout[-10_000:] + done.stderr[-10_000:]
    return done.stdout


def _fuzz(mutations: int, processes: int) -> None:
    options = ["--mutations", str(mutations), "--processes", str(processes), "--seed", "1"]
    assert f"{mutations} mutations" in _said("hostile", *options)


def test_readers_refuse_what_a_hostile_writer_wrote() -> None:
    _fuzz(20, processes=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readers_refuse_many_things_that_a_hostile_writer_wrote() -> None:
    _fuzz(50 * len(SCENES), processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_what_nobody_has_changed_can_be_read(server_url: str, tmp_path: Path, name: str) -> None:
    """Else a reader that refuses everything would pass."""
    with scene(name, server_url, tmp_path / "files") as found:
        before = found.digest()
        for reader in READERS.values():
            if reader.of in ("keys", "files", name):
                try:
                    with pytest.raises(KvpsError) if reader.refuses(name) else nullcontext():
                        reader.run(found, found.opened)
                except GaveUp:
                    assert reader.of == "keys", "only who waits for others gives up"
                assert reader.writes or not found.changed(before, found.digest())
                found.restore()
        assert not found.changed(before, found.digest())


@pytest.mark.parametrize(
    ("name", "publishes"), [("published", ""), ("published", "0"), ("BSP, two workers, Adam", "1")]
)
def test_a_job_that_lies_about_who_makes_its_versions_is_read_or_refused(
    server_url: str, tmp_path: Path, name: str, publishes: str
) -> None:
    """The lie is in both copies of its settings, so nobody can know better."""
    with scene(name, server_url, tmp_path / "files") as found:
        keys = found.opened().access.keys
        for reader in READERS.values():
            if reader.of in ("keys", name) and reader.every < 100:
                for key in (keys.config, keys.made_with):
                    found.raw.hset(key, "publishes", publishes) if publishes else found.raw.hdel(key, "publishes")
                assert isinstance(found.store.client, HurriedClient)
                found.store.client.begin()
                with suppress(KvpsError, GaveUp):
                    reader.run(found, found.opened)
                found.restore()


_ONCE = ("--minutes", "0", "--turn", "5")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(*_ONCE, "--least", "0"), ("--full",)])
def test_honest_jobs_train_with_the_same_bits_beside_a_hostile_one(options: tuple[str, ...]) -> None:
    assert "are those of a plain loop, bit for bit" in _said("hostile.beside", *options)


@pytest.mark.slow
def test_honest_jobs_that_are_slowed_down_are_seen() -> None:
    """A busy machine takes time from all turns; this client takes it in its own."""
    assert "that is less than 0.9" in _said("hostile.beside", *_ONCE, "--control", code=1)


@pytest.mark.slow
def test_each_role_does_what_the_page_says_and_other_jobs_go_on() -> None:
    _said("hostile.roles", "--seed", "1", "--share", "0.05", "--members", "70000")


@pytest.mark.parametrize(
    ("role", "more", "column"),
    [
        ("reader", ["+config|get"], "server"),
        ("evaluator", ["~kvps:{mine}:commits"], "its own job"),
        ("worker", ["~kvps:{other}:layout"], "other jobs"),
        ("actor", ["~kvps:{mine/*/*/}:w:*"], "its own job"),
        ("worker", ["%R~*"], "other jobs"),
        ("aggregator", ["%W~kvps:jobs"], "list of jobs"),
        ("aggregator", ["%R~rq:*"], "queue"),
    ],
)
def test_a_rule_too_many_is_seen_in_its_column(store: Store, raw: Any, role: str, more: list[str], column: str) -> None:
    if store.client.redis_version() < acl.READ_ONLY_KEYS:
        pytest.skip("it has no keys that may only be read")
    mine, other = (store.create_job(name, model()).access.keys for name in ("mine", "other"))
    rows = []
    for rules in (acl.rules(role, "mine"), [*acl.rules(role, "mine"), *more]):
        with user_of(store.url, raw, role, rules) as user:
            rows.append(reach(raw, user, mine, other).row(role))
    assert column in [name for name, *cells in zip(COLUMNS, *rows, strict=True) if len(set(cells)) > 1]
