"""More epochs for a job that is finished: what its script asks for, and the job that goes on with that.

The job's last version is restored as a new job, whose log goes on from the same head and says which settings differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvps.config import JobConfig, division_of
from kvps.config.job_config import value_of
from kvps.errors import InvalidSetting, KvpsError, UsageError
from kvps.history.checkpoint_directory import jobs_in, newest
from kvps.job import Job
from kvps.launch import ASKS, of_copy, other_settings
from kvps.machine import launcher
from kvps.machine.process import ending_with_this
from kvps.parsing import Fields
from kvps.protocol.run_control import RunControl
from kvps.run_jobs import Run, names_of
from kvps.store import Store, fresh_id
from kvps_cli.train.kept_files import KeptFiles
from kvps_cli.train.resume import Launch, Origin, check_fits, restored
from kvps_cli.train.stop import keep

_GROWS = ("epochs", "units", "rounds")


def further(command: Sequence[str], kept: KeptFiles, store: Store, name: str, launch: Launch) -> Origin | None:
    """Return the origin of a run whose only job is finished, and goes on because its script asks for more; else None.

    Raises InvalidSetting if the script asks for less, or for another job, KvpsError if it fails.
    """
    known = {*store.jobs(), *(jobs_in(launch.directory) if launch.directory else ())}
    if names_of(name, known) != [name]:
        return None  # a run of several jobs passes through its script
    job = store.job(name) if name in store.jobs() else None
    found = newest(launch.directory, name) if launch.directory and not job else None
    if not (job.state().finished(job.config) if job else found and found.checkpoint.finished):
        return None
    config = job.config if job else found.checkpoint.config if found else None
    if config is None or config.metadata.publishes:  # its script would publish instead of saying what it asks for
        return None
    stated = _asked(store, name, launch, command)
    if stated is None:
        return None
    asked = JobConfig.from_hash(config.to_hash() | stated, "what the script asks for")
    if not (differing := config.differing(asked, sorted(stated))):
        return None
    if others := [each for each in differing if each not in _GROWS]:
        raise InvalidSetting(other_settings(name, config, asked, others))
    if less := [each for each in differing if value_of(asked, each) < value_of(config, each)]:
        has, other = value_of(config, less[0]), value_of(asked, less[0])
        raise InvalidSetting(f"job {name!r} is finished with {less[0]} {has}, and {other} is less: nothing was changed")
    asked = replace(config.noting(rounds=asked.metadata.rounds), epochs=asked.epochs, units=asked.units)
    _check_same_units(name, config, asked)
    check_fits(name, config, launch)
    if job:
        _move(store, job, launch, kept)
        found = newest(launch.directory, name) if launch.directory else None
    assert found
    checkpoint = replace(
        found.checkpoint, config=asked, run=RunControl(), workers=_unfinished(found.checkpoint.workers)
    )
    job = restored(store, name, checkpoint, launch, before=found.checkpoint.config)
    more = ", ".join(f"{each} {value_of(config, each)} to {value_of(asked, each)}" for each in differing)
    line = f"job {name}: goes on at version {checkpoint.version}, from {found.path}, with {more}"
    return Origin(Run(name, job.id), [line])


def _asked(store: Store, name: str, launch: Launch, command: Sequence[str]) -> dict[str, str] | None:
    """Return the settings that the script states, as they are stored; None if it ends without asking for a job.

    It is started as the copy of rank 0, and ends at its `create_job`. Raises KvpsError if it fails before.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "asks"
        own = {"KVPS_REDIS_URL": store.url, launcher.VARIABLE: launch.launched_by, ASKS: str(answer)}
        environment = os.environ | own | of_copy(0, launch.workers, name, fresh_id(), launch.given)
        quiet = subprocess.DEVNULL  # what it writes to stderr is shown
        code = subprocess.run(ending_with_this(command), env=environment, stdin=quiet, stdout=quiet).returncode
        if answer.exists():
            return Fields.of_json(answer.read_text(), "what the script asks for").scalars()
    if code:
        raise KvpsError(f"job {name} is finished, and its script failed before it said what it asks for")
    return None


def _check_same_units(name: str, config: JobConfig, asked: JobConfig) -> None:
    """Raise InvalidSetting if the last unit, or the last round of units, that was trained is larger with more."""
    ours, theirs = config.unit_rounds, asked.unit_rounds
    same = not ours or not theirs or ours.units_of(ours.rounds - 1) == theirs.units_of(ours.rounds - 1)
    if config.samples:
        last = config.units - 1
        same &= division_of(config.samples, config).of(last) == division_of(config.samples, asked).of(last)
    if not same:
        raise InvalidSetting(
            f"job {name!r} is finished, and its last round was cut short by the end of its data: with more it would be "
            f"another one. Nothing was changed; begin anew under another name (--job NAME)"
        )


def _move(store: Store, job: Job, launch: Launch, kept: KeptFiles) -> None:
    """Move a finished job from the server into the run's directory: its last version, and its log."""
    if launch.directory is None:
        raise InvalidSetting(
            f"job {job.name!r} is finished, and its script asks for more: give --checkpoints DIR, where its last "
            f"version and its log are kept"
        )
    earlier = job.config.metadata.foreign_launcher
    if earlier and not earlier.is_dead and not earlier.is_elsewhere:
        raise UsageError(f"{earlier} has not ended yet, and job {job.name!r} is its: wait for its end")
    keep(job, kept, launch.quiet)
    store.remove_job(job.name, job.id)


def _unfinished(workers: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of workers that have more to do."""
    return {worker: json.dumps(json.loads(entry) | {"finished": False}) for worker, entry in workers.items()}
