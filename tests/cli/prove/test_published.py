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


def _weights(version: int) -> dict[str, Any]:
    flat = np.random.default_rng(0).normal(size=1_000).astype(np.float16)
    flat[:version] += np.float16(1)
    return {"w": flat, "steps": np.array(version, np.int64)}


def _publish(store: Store, upto: int, name: str = "policy") -> None:
    with store.publisher(name, _weights(0)) as policy:
        while policy.version < upto:
            policy.publish(_weights(policy.version + 1), loss=0.5)


def test_verify_says_what_is_proved(store: Store, printed: Callable[..., str]) -> None:
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
