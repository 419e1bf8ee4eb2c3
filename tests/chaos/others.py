"""The same killer against parameter servers of others, which run in an environment of their own.

KVPS_PEERS_PYTHON names a Python that has torch and ray; without it what was measured before is kept.
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
Each runs its own documented recipe of a parameter server on this machine, with one SIGKILL a trial, half-way. `went on`
are the trials in which the others went on, or the job to its end. `lost` were acknowledged and are not in the weights:
those are in the server's process alone, and neither recipe promises more. `twice` are in the weights beyond what was
asked for: Ray's retries are at least once, as it says. Who hangs fails when RPC gives up its call, after 60 s."""
SCRIPTS = ("torch_rpc.py", "ray_actors.py")


def peers_are_killed(arena: Arena, options: dict[str, list[str]] | None = None) -> Result:
    """Run the script of each peer, and take what it prints: a row for each kind of fault."""
    result = Result("peers", "others' workers and servers killed", arena.seed, ours=False, note=_NOTE)
    python = os.environ.get(PYTHON)
    if not python:
        result.skipped = f"not installed: {PYTHON} names no Python with torch and ray"
        return result
    for script in SCRIPTS:
        path = Path(__file__).parent / "peers" / script
        done = subprocess.run(
            [python, str(path), *(options or {}).get(script, [])], cwd=arena.folder, capture_output=True, text=True
        )
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # ray prints more
        result.rows += rows
        if done.returncode or not rows:
            result.problems.append(f"{script} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        for row in rows:
            result.faults[f"{row['peer']}: {row['fault']}"] = row["kills"]
            arena.say(", ".join(f"{what} {entry}" for what, entry in row.items()))
    return result
