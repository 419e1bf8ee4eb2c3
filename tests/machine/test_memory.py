"""The memory that a process may use: the least of machine and control groups, v1 and v2; and who is killed for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.control_groups import control_group

from kvps.machine.memory import Memory, kills

MB = 1 << 20
MEMINFO = "MemTotal:       1024000 kB\nMemFree:         1000 kB\nMemAvailable:    512000 kB\nHugePages_Total:       0\n"
MACHINE = Memory(1_024_000 << 10, 512_000 << 10)


def written(folder: Path, files: Mapping[str, str]) -> tuple[Path, Path]:
    """Write files of /proc and of the control groups, as the kernel has them; return the folders of both."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/vmstat": "pgfault 9\noom_kill 5\n", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "proc", folder / "groups"


V2 = {"proc/self/cgroup": "0::/pod/one\n", "groups/memory.stat": "inactive_file 7\n"}
ONE, POD = "groups/pod/one/memory.", "groups/pod/memory."
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/\n4:hugetlb,memory:/docker/of/the/host\n0::/elsewhere\n"}
ROOT = "groups/memory/memory."


@pytest.mark.parametrize(
    ("files", "memory", "killed"),
    [
        ({}, MACHINE, 5),
        (V2, MACHINE, 5),
        (
            V2 | {f"{ONE}max": "max", f"{ONE}current": "9\n", f"{ONE}events": "oom 3\noom_kill 2\noom_group_kill 0\n"},
            MACHINE,
            2,
        ),
        (
            V2
            | {f"{ONE}max": f"{400 * MB}\n", f"{ONE}current": f"{300 * MB}\n"}
            | {f"{ONE}stat": f"anon 1\ninactive_file {50 * MB}\nactive_file 3\n"},
            Memory(400 * MB, 150 * MB, True),
            5,
        ),
        (
            V2 | {f"{POD}max": f"{300 * MB}\n", f"{POD}current": f"{400 * MB}\n", f"{ONE}max": f"{350 * MB}\n"},
            Memory(300 * MB, 0, True),
            5,
        ),
        (
            V1
            | {f"{ROOT}limit_in_bytes": f"{400 * MB}\n", f"{ROOT}usage_in_bytes": f"{100 * MB}\n"}
            | {f"{ROOT}stat": f"inactive_file 1\ntotal_inactive_file {MB}\n"}
            | {f"{ROOT}oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"},
            Memory(400 * MB, 301 * MB, True),
            3,
        ),
        (V1 | {f"{ROOT}limit_in_bytes": "9223372036854771712\n", f"{ROOT}usage_in_bytes": "1\n"}, MACHINE, 5),
    ],
)
def test_the_least_counts(tmp_path: Path, files: Mapping[str, str], memory: Memory, killed: int) -> None:
    places = written(tmp_path, files)
    assert Memory.here(*places) == memory
    assert kills(*places) == killed


def test_where_nothing_is_known(tmp_path: Path) -> None:
    assert Memory.here(tmp_path, tmp_path) is None
    assert kills(tmp_path, tmp_path) == 0


def test_a_real_control_group() -> None:
    with control_group(200 * MB) as enters:
        code = "from kvps.machine.memory import *; m = Memory.here(); print(m.total, m.contained, m, kills())"
        code += (
            "; import subprocess, sys; subprocess.run([sys.executable, '-c', 'bytearray(400 << 20)']); print(kills())"
        )
        done = subprocess.run([*enters, sys.executable, "-c", code], capture_output=True, text=True, check=True)
        total, contained, *words = done.stdout.split()
        assert (total, contained, words[-6:]) == (str(200 * MB), "True", ["free", "in", "this", "container", "0", "1"])
