"""The same killer against parameter servers of other projects, which run in their own environment.

KVPS_PEERS_PYTHON names a Python that has torch and ray. Without it, the earlier results are kept.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from chaos.arena import Arena
from chaos.report import Result

PYTHON = "KVPS_PEERS_PYTHON"
_NOTE = """\
Each system runs its own documented recipe of a parameter server on this machine, with one SIGKILL per trial, half-way.
`went on` counts the trials in which the other processes continued, or the job reached its end. `lost` counts gradients
that were acknowledged and are not in the weights: the weights are in the server's process alone, and neither recipe
promises more. `twice` counts gradients in the weights beyond those asked for: Ray's retries are at least once, as its
documentation says. A process that hangs fails when RPC gives up its call, after 60 s."""
SCRIPTS = ("torch_rpc.py", "ray_actors.py")


def peers_are_killed(arena: Arena, options: dict[str, list[str]] | None = None) -> Result:
    """Run the script of each peer, and take the rows that it prints, one for each kind of fault."""
    result = Result("peers", "other systems' processes killed", arena.seed, ours=False, note=_NOTE)
    python = os.environ.get(PYTHON)
    if not python:
        result.skipped = f"not installed: {PYTHON} names no Python with torch and ray"
        return result
    for script in SCRIPTS:
        path = Path(__file__).parent / "peers" / script
        done = subprocess.run(
            [python, str(path), *(options or {}).get(script, [])], cwd=arena.folder, capture_output=True, text=True
        )
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # Ray prints more lines
        result.rows += rows
        if done.returncode or not rows:
            result.problems.append(f"{script} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        for row in rows:
            result.faults[f"{row['peer']}: {row['fault']}"] = row["kills"]
            arena.say(", ".join(f"{what} {entry}" for what, entry in row.items()))
    return result
