"""Where rows go, as a user says it: what cannot work is one line, before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvps_monitor.loggers.targets import Target

from kvps.errors import InvalidSetting


@pytest.mark.parametrize("text", ["csv", "csv:", "tensorboard:", "wandb:x", "", "xml:a", "CSV:a"])
def test_what_is_no_log(text: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Target.parse(text)
    assert "\n" not in str(caught.value)


def test_what_is_one() -> None:
    assert Target.parse("csv:a:b.csv") == ("csv", Path("a:b.csv"))
    assert Target.parse("tensorboard") == ("tensorboard", None)
    assert str(Target.parse("tensorboard:x/y")) == "tensorboard:x/y"


@pytest.mark.parametrize(("text", "library"), [("tensorboard", "tensorboardX or tensorboard"), ("wandb", "wandb")])
def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, library: str) -> None:
    (tmp_path / text).mkdir()  # a folder of logs is no library
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.split(".")[0] in library.split(" or ")]:
        monkeypatch.delitem(sys.modules, name)
    sys.path_importer_cache.clear()
    with pytest.raises(InvalidSetting, match=f"needs {library}: pip install"):
        Target.parse(text)


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in (f"csv:{tmp_path}", f"csv:{tmp_path}/none/a.csv", f"tensorboard:{tmp_path}/file"):
        with pytest.raises(InvalidSetting) as caught:
            Target.parse(text).check()
        assert str(caught.value).startswith(text)
        assert "\n" not in str(caught.value)


def test_a_new_job_needs_a_file_of_its_own(tmp_path: Path) -> None:
    target = Target.parse(f"csv:{tmp_path}/a.csv")
    target.check(fresh=True)
    target.check(fresh=True)
    (tmp_path / "a.csv").write_text("version,job,at_ms\n")
    target.check()
    with pytest.raises(InvalidSetting, match="has rows of another job"):
        target.check(fresh=True)
