"""What a shell completes, asked for as bash does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.commands import kvps_run

from kvps.store import Store

pytestmark = pytest.mark.slow

TASK = "class Mine:\n" + "".join(f"    def {name}(self): ...\n" for name in ("parameters", "data", "gradient"))


def completed(line: str, **environment: str) -> list[str]:
    """Return what bash offers for the last word of a line."""
    done = kvps_run(COMP_WORDS=line, COMP_CWORD=str(line.count(" ")), _KVPS_COMPLETE="complete_bash", **environment)
    assert done.stderr == ""
    return done.stdout.split()


def test_jobs_tasks_and_optimizers_are_completed(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir.py").write_text(f"{TASK}\n\nclass Other:\n    pass\n\nraise SystemExit('imported')\n")
    (tmp_path / "damaged.py").write_text("class Mine(:\n")
    for name in ("mine", "mint", "other"):
        store.create_job(name, {"x": np.zeros(1, np.float32)}, workers=1)
    there = {"KVPS_REDIS_URL": store.url}
    assert completed("kvps status mi", **there) == ["mine", "mint"]
    assert completed("kvps worker --job o", **there) == ["other"]
    assert completed("kvps up d", **there) == ["digits", "dir:Mine"]
    assert completed("kvps up digits --optimizer ada", **there) == ["adadelta", "adagrad", "adam", "adamw", "adamax"]
    assert completed("kvps status m", KVPS_REDIS_URL="redis://127.0.0.1:1") == [], "it says nothing, and does not wait"
    assert completed("kvps status m", KVPS_REDIS_URL="nonsense") == []
    assert completed("kvps che") == ["checkpoint"]
    assert completed("kvps up --units") == ["--units-per-round"], "--help leaves it out"
