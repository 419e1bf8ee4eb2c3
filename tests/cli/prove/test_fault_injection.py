"""`kvps up --kill-every`: each kill is told, and the check at the end has its say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.commands import kvps_run

pytestmark = pytest.mark.slow  # each starts whole commands


def test_kills_are_told_and_nothing_is_lost(home: Path) -> None:
    """A worker needs longer than 0.1 s to start: if no kill waited for a commit, no round would be done. The check at
    the end reads the moved part of the log too."""
    done = kvps_run(
        *("up", "digits", "--epochs", "4", "--kill-every", "0.1", "--workers", "2", "--checkpoint-every", "10")
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(
        r"(\d+) kills?, \d+ acknowledged, 0 lost, 0 twice, replay identical", done.stdout.splitlines()[-1]
    )
    assert found, done.stdout
    kill = re.compile(
        r"(w[01]|aggregator1?) \(process \d+\) was killed \(SIGKILL, by --kill-every\)"
        r"(: (.*; )?started again as process \d+| after its last round: not started again)"
    )
    told = [line for line in done.stderr.splitlines() if kill.fullmatch(line)]
    assert 0 < len(told) <= int(found[1]), "the last may be killed when nobody looks any more"
