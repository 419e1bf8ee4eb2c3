"""A script under `kvps run` that trains the job of the proof. Its arguments: seconds that a unit takes, and a seed."""

import random
import sys

import kvps
from same_bits.job import parameters, settings_of
from same_bits.workers import Member, slow_at_times

seconds, seed = float(sys.argv[1]), int(sys.argv[2])
with kvps.from_env() as worker:
    job = worker.create_job(parameters(), **settings_of())
    Member(job, worker.id, slow_at_times(random.Random(seed + worker.rank), chance=0.9, seconds=seconds))()
