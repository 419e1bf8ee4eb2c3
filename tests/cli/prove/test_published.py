"""Commands that prove and save a job, where a learner publishes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvps_cli.supervise import SAME_BITS

import kvps
from kvps.store import Store

Printed = Callable[..., str]


def _weights(version: int) -> dict[str, Any]:
    flat = np.random.default_rng(0).normal(size=1_000).astype(np.float16)
    flat[:version] += np.float16(1)
    return {"w": flat, "steps": np.array(version, np.int64)}


def _publish(store: Store, upto: int, name: str = "policy") -> None:
    with store.publisher(name, _weights(0)) as policy:
        while policy.version < upto:
            policy.publish(_weights(policy.version + 1), loss=0.5)


def test_verify_says_what_is_proved(store: Store, printed: Printed) -> None:
    where = {"KVPS_REDIS_URL": store.url} | SAME_BITS  # without these, the command starts anew
    _publish(store, 4)
    head = store.job("policy").state().head
    chain, published, differences, weights = printed("verify", "policy", **where).splitlines()
    assert chain == f"chain       4 commits, 0 contributions: unbroken, ends at the job's head {head[:12]}"
    assert published == "published   4 versions by 1 learner"
    assert differences == "differences 3 follow", "where version 0 lies, nothing says any more"
    assert weights.startswith("weights     version 4, sha256 ")
    assert weights.endswith(": in Redis as logged by its commit")
    proof = json.loads(printed("verify", "policy", "--json"))
    assert (proof["learners"], proof["differences"], proof["differs"]) == (1, 3, "")
    with pytest.raises(kvps.InvalidSetting, match="--record: a learner publishes job 'policy'"):
        printed("verify", "policy", "--record", str(Path.cwd()))
    job = store.job("policy")
    store.client.call("SETRANGE", job.access.keys.weights(0, job.state().names[0], 0), 0, "changed")
    with pytest.raises(kvps.KvpsError, match="job policy: version 4: the weights of shard 0 in Redis are not those"):
        printed("verify", "policy", "--quiet")


def test_checkpoints_are_saved_listed_and_restored(store: Store, printed: Printed, tmp_path: Path) -> None:
    _publish(store, 4)
    where = {"KVPS_REDIS_URL": store.url}
    assert "job policy: version 4 in" in printed("checkpoint", "save", "policy", "--to", str(tmp_path), **where)
    listed = json.loads(printed("checkpoint", "ls", str(tmp_path), "--json"))
    assert [(one["job"], one["version"], one["mode"], one["state"]) for one in listed] == [
        ("policy", 4, "published", "ok")
    ]
    file = tmp_path / listed[0]["file"]
    said = printed("checkpoint", "restore", str(file), "--job", "again", "--shards", "3")
    assert said == f"job again: continues from version 4 of {file}\n", "it waits for no worker"
    _publish(store, 6, "again")
    chain, published, *_ = printed("verify", "again", "--checkpoints", str(tmp_path), **SAME_BITS).splitlines()
    assert chain.startswith("chain       6 commits, 0 contributions: unbroken")
    assert published == "published   6 versions by 2 learners"
    chain, published, *_ = printed("verify", "again").splitlines()
    assert chain.startswith("chain       2 commits after version 4")
    assert published == "published   2 versions by 1 learner"


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("only_in_a_file", [False, True])
def test_a_run_does_not_resume_it(
    store: Store, printed: Printed, tmp_path: Path, finished: bool, only_in_a_file: bool
) -> None:
    """It would wait for workers; and a script that publishes would run before it is asked to."""
    with store.publisher("train", _weights(0), checkpoints=tmp_path, checkpoint_every=1) as policy:
        policy.publish(_weights(1))
        if not finished:
            policy.close()
    config = dict(store.client.call("HGETALL", policy.job.access.keys.config))
    if only_in_a_file:
        store.remove_job("train")
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')\n")
    line = ["run", "--redis", store.url, "--checkpoints", str(tmp_path), "--resume", "--", str(tmp_path / "train.py")]
    with pytest.raises(kvps.InvalidSetting, match="job 'train' has no workers: its learner goes on with it by"):
        printed(*line)
    if only_in_a_file:
        assert store.jobs() == []
    else:
        assert store.client.call("HGETALL", policy.job.access.keys.config) == config, "nothing was changed"
