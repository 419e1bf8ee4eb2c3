"""kvps_bench links: a tiny run over hosts, what must pass over a link at least, and what is said without the right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import bench_run
from kvps_bench import links
from kvps_bench.hosts import Network, NoHosts

TINY = ["links", "--mb", "0.4", "--workers", "2", "--quick", "--turns", "1", "--json"]


def measured(**environment: str) -> dict[str, Any]:
    done = bench_run(*TINY, **environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert [row["case"] for row in found["rows"]] == list(links.SETTINGS)
    assert len(found["bars"]) == len(links.SETTINGS)
    return found


@pytest.mark.slow  # it starts many processes
def test_each_case_is_measured_and_its_bytes_are_counted(home: Path) -> None:
    try:
        Network(1).__exit__()
    except NoHosts as why:
        pytest.skip(str(why))
    for row in measured()["rows"]:
        assert row["p50_ms"] > 0
        for way in ("in", "out"):  # at these sizes chunks' names and the protocol's own commands show
            assert 0.9 * row["least_mb"] <= row[f"{way}_mb"] <= 1.5 * row["least_mb"] + 0.3, row


@pytest.mark.slow  # it starts whole commands
def test_where_hosts_may_not_be_made_each_case_says_why(home: Path, tmp_path: Path) -> None:
    refused = tmp_path / "unshare"
    refused.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    refused.chmod(0o755)
    found = measured(PATH=f"{tmp_path}:{os.environ['PATH']}")
    for each in [*found["rows"], *found["bars"]]:
        assert each["not_measured"] == "hosts may not be made here: unshare: unshare failed: Operation not permitted"


@pytest.mark.parametrize(("workers", "least"), [(2, 40), (4, 60)])
def test_the_least_that_must_pass_over_a_link(workers: int, least: float) -> None:
    """With 2, half of a gradient and of the weights comes, and half goes: as in a ring."""
    assert links.SETTINGS["fp32"].least(workers, 40) == least
