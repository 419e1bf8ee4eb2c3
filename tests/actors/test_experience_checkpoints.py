"""A checkpoint of a published job has the experience that waited at that instant, and a learner goes on from both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import kvps
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import newest
from kvps.store import Store

pytestmark = pytest.mark.contract

PROMPTS = kvps.Rollouts(prompts=4, group=2, max_staleness=5, capacity=8)


def _weights(number: float) -> dict[str, np.ndarray]:
    return {"experience/0": np.full(3, number, np.float32)}


def _put(store: Store, name: str, number: int, unit: int | None = None) -> str:
    """Have an actor of its own put one item, whose bits follow from the number."""
    with store.watch("policy", actor=name) as policy:
        policy.update()
        if unit is not None:
            assert policy.next_unit() == unit
        id = policy.rollouts.put({"x": np.arange(number, number + 300_000), "n": number}, version=policy.version)
    assert id
    return id


def test_what_waits_and_what_is_taken_goes_on_with_the_weights(store: Store, tmp_path: Path) -> None:
    policy = store.publisher("policy", _weights(0), rollouts=PROMPTS)
    for number in range(2):
        _put(store, "a", number, 0)
    assert policy.publish(_weights(1), trained=policy.rollouts.take(groups=1)) == 1
    taken, partial = [_put(store, "a", number, 1) for number in (2, 3)], _put(store, "b", 4, 2)
    assert [item.id for item in policy.rollouts.take(groups=1)] == taken
    path = tmp_path / (made := policy.job.checkpoint()).filename
    made.write(path)
    policy.close()
    assert np.array_equal(load_file(path)["experience/0"], _weights(1)["experience/0"]), "names of weights are theirs"
    store.remove_job("policy")

    with store.publisher("policy", _weights(9), checkpoints=tmp_path, resume=True, rollouts=PROMPTS) as policy:
        assert policy.version == 1
        now = policy.job.rollouts.now()
        assert (now.waiting, now.taken, now.trained, now.handed_out, now.closed) == (3, 0, 2, 3, 1)
        items = policy.rollouts.take(groups=1)
        assert [(item.id, item.data["n"], item.unit, item.version) for item in items] == [
            (taken[0], 2, 1, 1),
            (taken[1], 3, 1, 1),
        ]
        assert all(np.array_equal(i.data["x"], np.arange(i.data["n"], i.data["n"] + 300_000)) for i in items)
        assert policy.publish(_weights(2), trained=items) == 2
        other = _put(store, "c", 5, 2)
        assert [item.id for item in policy.rollouts.take(groups=1)] == [partial, other], "a group is made up by others"
        policy.rollouts.reject([partial, other], "no advantage")
        for number in (6, 7):
            _put(store, "a", number, 3)
        assert policy.publish(_weights(3), trained=policy.rollouts.take(groups=1)) == 3
        assert policy.rollouts.take(groups=1) == []
        fates = {each.id: (each.fate, each.version) for each in policy.job.rollouts.fates()}
    assert (fates[taken[0]], fates[partial]) == (("trained", 2), ("rejected", 2))
    assert [fate for fate, _ in fates.values()].count("trained") == 4


def test_a_learner_writes_them_while_it_publishes(store: Store, tmp_path: Path) -> None:
    with store.publisher("policy", _weights(0), checkpoints=tmp_path, checkpoint_every=1) as policy:
        for number in range(12):
            ids = [_put(store, "a", 2 * number + i) for i in range(2)]
            batch = policy.rollouts.take(1)
            assert policy.publish(_weights(number + 1), trained=batch) == number + 1
            policy.rollouts.reject(policy.rollouts.take(1), "enough")
            assert batch[0].id == ids[0]
    found = newest(tmp_path, "policy")
    assert found
    assert (found.checkpoint.version, found.checkpoint.experience.records) == (12, {})
    for path in tmp_path.glob("*.safetensors"):
        Checkpoint.load(path)  # each is whole


def test_a_damaged_item_of_a_file_is_one_line(store: Store, tmp_path: Path) -> None:
    with store.publisher("policy", _weights(0)) as policy:
        _put(store, "a", 0)
        path = tmp_path / (made := policy.job.checkpoint()).filename
        made.experience.values[next(iter(made.experience.values))][70] ^= 1
        made.write(path)
    with pytest.raises(kvps.CorruptData, match="has other bytes than when it was accepted"):
        Checkpoint.load(path)
