"""A job and a store go to other processes, as multiprocessing's spawn and Ray send them; a session does not."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
from helpers.harness import aggregating, model

import kvps
from kvps.store import Store


@pytest.mark.usefixtures("forked")
def test_a_job_opens_anew_where_it_is_unpickled(store: Store) -> None:
    job = store.create_job("job", model(), workers=1)
    code = "import pickle, sys; job = pickle.load(sys.stdin.buffer); session = job.join('w0'); session.pull()\n"
    code += "session.push(session.pull()); session.leave(); print(job.name, job.id)"
    with aggregating(job):
        done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(job), capture_output=True, timeout=120)
        assert done.stdout.decode().split() == ["job", job.id], done.stderr.decode()
    assert job.state().version == 1
    data = pickle.dumps(job)
    store.remove_job("job")
    with pytest.raises(kvps.JobNotFound):
        pickle.loads(data)
    again = store.create_job("job", model())
    with pytest.raises(kvps.JobNotFound):
        pickle.loads(data)
    assert copy.deepcopy(again).id == again.id


def test_a_store_opens_anew_where_it_is_unpickled(store: Store) -> None:
    store.create_job("job", model())
    with pickle.loads(pickle.dumps(store)) as other:
        assert other.client is not store.client
        assert (other.url, other.jobs()) == (store.url, ["job"])


def test_a_session_says_what_to_hand_over(store: Store) -> None:
    job = store.create_job("job", {"x": np.zeros(3, np.float32)}, workers=1)
    with job.join("w0") as session, pytest.raises(kvps.KvpsError, match=r"'w0' belongs to its thread, .* the job"):
        pickle.dumps(session)
