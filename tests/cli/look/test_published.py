"""A job that a learner publishes, on each command: what they say is true of it, and what makes no sense is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvps.errors import InvalidSetting, JobError, UsageError
from kvps.store import Store

Said = Callable[..., str]


@pytest.fixture
def said(store: Store, printed: Said) -> Said:
    """A function that runs a command on the server, and returns what it says."""
    return lambda *words: printed(*words, KVPS_REDIS_URL=store.url).strip()


def weights(number: float) -> dict[str, np.ndarray]:
    return {"x": np.full(3, number, np.float32)}


def test_each_screen_says_who_publishes_it_and_what_the_loss_is(store: Store, said: Said) -> None:
    with store.publisher("job", weights(0), shards=2) as policy:
        for number in (1, 2):
            policy.publish(weights(number), loss=1 / number)
        [holder] = set(policy.job.access.reader.holders())
        assert said("jobs").splitlines()[1].split()[:5] == ["job", "-", "published", "-", "2"]
        assert said("jobs").splitlines()[1].endswith("runs")
        assert said("status", "job").splitlines() == [
            "job  runs  made in Python  published  its learner's own optimizer",
            f"version 2  head {policy.job.state().head[:12]}  loss 0.5000",
            f"shard 0  {holder}",
            f"shard 1  {holder}",
            f"published by {holder}",
        ]
        found = json.loads(said("status", "job", "--json"))
        assert (found["mode"], found["state"], found["workers"], found["loss"]) == ("published", "runs", 0, 0.5)
        assert found["optimizer"] is found["lr"] is None
        top = said("top", "job", "--once").splitlines()
        assert top[1].endswith(f"published by {holder}  loss 0.5000 █▁")
        assert not {"backlog", "workers", "worker"} & set(" ".join(top).split())
        assert said("log", "job", "-n", "1").endswith(f"version 2: published by {holder}, loss 0.5")
        assert json.loads(said("log", "job", "-n", "1", "--json"))["loss"] == 0.5
        assert said("inspect", "job").splitlines()[0] == "version 2"
        with pytest.raises(InvalidSetting, match=f"at version 2, which {holder} publishes"):
            said("rm", "job")


def test_a_job_that_was_left_waits_for_a_learner_and_a_finished_one_for_nobody(store: Store, said: Said) -> None:
    policy = store.publisher("job", weights(0))
    policy.close()
    assert said("jobs").endswith("  waits for a learner")
    left = said("status", "job").splitlines()
    assert left[0].startswith("job  waits for a learner  ")
    assert left[2:] == ["shard 0  -", "no learner publishes it now"]
    with pytest.raises(InvalidSetting, match="which no learner publishes now"):
        said("rm", "job")
    with store.publisher("job", weights(0)) as policy:
        policy.publish(weights(1))
    assert said("jobs").endswith("  finished")
    assert said("status", "job").startswith("job  finished  made in Python")
    assert said("stop", "job") == said("pause", "job") == "job job: its learner has finished"
    assert said("resume", "job") == "job job: goes on; it was stopped: its learner has finished"
    assert said("jobs").endswith("  waits for a learner")


def test_its_run_is_steered_from_the_command_line(store: Store, said: Said) -> None:
    with store.publisher("job", weights(0)) as policy:
        assert said("pause", "job", "--reason", "look") == "job job: paused: look"
        assert said("status", "job").startswith("job  paused: look  ")
        policy.publish(weights(1), wait=False)
        # The learner's thread may say meanwhile that it waits.
        assert said("resume", "job").splitlines()[-1] == "job job: goes on; it was paused: look"
        assert policy.wait() == 1
        assert said("suspend", "job") == "job job: suspended; its learner publishes no more version"
        assert said("stop", "job") == "job job: stopped; its learner publishes no more version"
        assert said("jobs").endswith("  finished; stopped")


def test_what_is_for_workers_is_refused_in_one_line(store: Store, said: Said) -> None:
    with store.publisher("job", weights(0)) as policy:
        policy.publish(weights(1))
        for words, why in (
            (("set", "job", "lr=0.1"), "has no learning rate: set it in the learner"),
            (("scale", "job", "3"), "has no workers to keep: a learner publishes it"),
            (("worker", "--job", "job"), "takes no worker and no aggregator: a learner publishes it"),
            (("aggregator", "start", "--job", "job"), "takes no worker and no aggregator: a learner publishes it"),
        ):
            with pytest.raises(UsageError, match=why) as refused:
                said(*words)
            assert "\n" not in str(refused.value)
        assert (policy.job.state().lr, policy.publish(weights(2))) == (None, 2)


def test_its_versions_and_losses_are_written_to_files(store: Store, said: Said, tmp_path: Path) -> None:
    with store.publisher("job", weights(0), shards=2) as policy:
        with pytest.raises(JobError, match="its learner has published no version"):
            said("timeline", "job", "-o", str(tmp_path / "none.svg"))
        for number in range(1, 16):
            policy.publish(weights(number), loss=number)
    assert "2 shards, 12 versions (4 to 15)" in said("timeline", "job", "-o", str(tmp_path / "job.svg"))
    said("log", "job", "--to", f"csv:{tmp_path / 'job.csv'}")
    titles, *rows = (tmp_path / "job.csv").read_text().splitlines()
    assert titles == "version,job,at_ms,loss"
    assert [(row.split(",")[0], row.split(",")[3]) for row in rows] == [(str(n), str(n)) for n in range(1, 16)]
