"""Sizes and times as people write them."""

from __future__ import annotations

import re

from kvps.errors import InvalidSetting

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_TIME = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*(us|ms|s|min|h)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_size(option: str, text: str) -> float:
    """Return 10GB, 512MiB, 25Gb or 1e9 as a number of the unit that is meant. Raises InvalidSetting."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise InvalidSetting(f"{option} must be a number with a unit, as 10GB, 512MiB or 25Gb, not {text!r}")
    number, prefix, binary, unit = match.groups()
    bits = option == "--bandwidth"
    if unit and (unit == "b") != bits:
        wanted = "bits a second, as 25Gb" if bits else "bytes, as 10GB"
        raise InvalidSetting(f"{option} is in {wanted}, not {text!r}")
    factor = 1024 ** "_kmgt".index(prefix.lower()) if binary and prefix else _UNITS[prefix.lower()]
    return float(number) * factor


def parse_time(option: str, text: str) -> float:
    """Return 100ms, 2s or 1min in seconds. Raises InvalidSetting."""
    match = _TIME.fullmatch(text.strip())
    if not match:
        raise InvalidSetting(f"{option} must be a time with a unit, as 50us, 100ms, 2s, 1min or 1h, not {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def seconds(value: float) -> str:
    """Return a time with a unit that suits it."""
    for least, unit in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= least * 0.9995:
            return f"{value / least:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def size(value: float) -> str:
    """Return a number of bytes with a unit that suits it."""
    for least, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= least * 0.9995:
            return f"{value / least:.3g} {unit}"
    return f"{value:.3g} B"
