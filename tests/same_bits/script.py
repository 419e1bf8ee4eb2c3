"""A script under `kvps run` that trains a job of the proof. Its arguments: which job, seconds that a unit takes, and a
seed."""

import random
import sys

import kvps
from same_bits.cnn import CNN
from same_bits.workers import DIGITS, slow_at_times

kind = {kind.name: kind for kind in (DIGITS, CNN)}[sys.argv[1]]
seconds, seed = float(sys.argv[2]), int(sys.argv[3])
with kvps.from_env() as worker:
    rng = random.Random(seed + worker.rank)
    job = worker.create_job(kind.parameters(), **kind.settings_of())
    kind.copy(job, worker.id, slow_at_times(rng, chance=0.9, seconds=seconds), rng)
