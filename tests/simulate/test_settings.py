"""What can be simulated, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvps_simulate.settings import Constants, Setting

from kvps.errors import InvalidSetting, KvpsError


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workers": 0}, "--workers must be from 1"),
        ({"compute_s": float("nan")}, "--compute must be from 0"),
        ({"jitter": -1}, "--jitter must be"),
        ({"topology": "ring"}, "--topology must be one of apart"),
        ({"optimizer": "lion"}, "--optimizer must be one of sgd"),
        ({"weight_format": "int8"}, "--weight-format must be one of fp32, bf16"),
        ({"gradient_format": "fp8"}, "gradient_format must be one of"),
        ({"nodes": 4, "shards": 2}, "--shards 2 leaves some"),
        ({"topology": "beside", "workers": 2, "nodes": 3}, "2 workers cannot be hosts of 3 data nodes"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said) as refused:
        Setting(**settings)
    assert "\n" not in str(refused.value)


def test_a_setting_fills_in_what_follows() -> None:
    setting = Setting(nodes=3)
    assert (setting.aggregators, setting.shards, setting.max_pending) == (3, 3, 1)
    assert Setting(staleness=2).max_pending == 3
    assert Setting(staleness=-1).mode == "ASP"


def test_constants_are_read_from_a_file_and_a_bad_one_is_named(tmp_path: Path) -> None:
    own = Constants.load()
    file = tmp_path / "own.json"
    file.write_text(own.to_json({"command": "by hand"}))
    assert Constants.load(file) == own
    assert own.of_format(own.encode, "topk:0.3") == own.encode["topk"]
    for text in ("", "[]", "{}", json.dumps({"constants": {"put_byte": "fast"}})):
        file.write_text(text)
        with pytest.raises(KvpsError, match=r"own\.json"):
            Constants.load(file)
    with pytest.raises(InvalidSetting, match=r"--constants .*: No such file"):
        Constants.load(tmp_path / "none.json")
