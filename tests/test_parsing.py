"""What anybody may have written is parsed into typed, bounded values, or refused in one printable line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvps import parsing
from kvps.errors import CorruptData, KvpsError
from kvps.parsing import Fields, bytes_text
from kvps.protocol.noted_versions import Pin
from kvps.protocol.plan import Contribution, Plan

REFUSED: list[tuple[Callable[[Any, str], Any], Any]] = [
    *(
        (parsing.whole, value)
        for value in ("x", "", "-1", "1.5", 1.5, True, None, [], "9" * 400, 10**40, "\u0663", "1e3")
    ),
    *((parsing.number, value) for value in ("inf", "nan", "1e400", 10**310, True, None, "x", "0x1")),
    *((parsing.text, value) for value in ("\x1b[2J", "\ud800", "\u202e", "a\nb", "x" * 1025, 5, None)),
    *((parsing.name, value) for value in ("", "../x", "*", "a b", "x" * 65, "\u00fc", "a\n", ".a", "=a", None)),
    *((parsing.word, value) for value in ("", "a/b", "*", "x" * 129)),
    *(
        (parsing.file_name, value)
        for value in ("", ".", "..", "/etc/passwd", "a/../b", "a\0b", "~", "a\n", "x" * 256, None)
    ),
    *(
        (parsing.from_json, value)
        for value in ("", "{", "[" * 100_000, "NaN", "[[[[[[[[[1]]]]]]]]]", "1" * 5000, None, 5)
    ),
    (Fields.of_json, "[]"),
    (lambda value, _: Plan.from_json(value), '{"id": 1}'),
    (lambda value, _: Contribution.from_text(value), "../w 1-a 1 1 0 1 - ff"),
    (lambda value, _: Pin.of(value, 2), '{"version": 3, "names": {"0": "3.a"}}'),
    (lambda value, _: Pin.of(value, 1), '{"version": 3, "names": {"0": "../../x"}}'),
]


@pytest.mark.parametrize(("parse", "value"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_short_line(parse: Callable[[Any, str], Any], value: Any) -> None:
    with pytest.raises(CorruptData) as refused:
        parse(value, "key")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_what_fits_is_returned() -> None:
    text = '{"n": 3, "d": "12", "s": 2.0, "x": "0.5", "t": "caf\u00e9", "f": true, "w": "3.a-b", "l": [1]}'
    f = Fields.of_json(text, "it")
    assert (f.whole("n"), f.whole("d"), f.whole("s"), f.number("x")) == (3, 12, 2, 0.5)
    assert (f.text("t"), f.flag("f"), f.word("w"), f.sequence("l", 1)) == ("caf\u00e9", True, "3.a-b", [1])
    assert f.whole("none", default=7) == 7
    with pytest.raises(CorruptData, match="it: none is missing"):
        f.whole("none")


def test_an_error_is_printable_whatever_it_quotes() -> None:
    assert str(KvpsError("job \x1b[31m\u202e\ud800")) == r"job \x1b[31m\u202e\ud800"


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (128e9, "128.0 GB")],
)
def test_bytes_have_the_unit_that_suits_them(count: float, shown: str) -> None:
    assert bytes_text(count) == shown


def test_json_has_null_for_what_is_not_finite() -> None:
    """JSON has no NaN and no Infinity, and a strict parser refuses the whole line."""
    value = {"loss": float("inf"), "each": [1.5, (float("nan"), "x")], "none": None, "n": 3}
    assert parsing.json_of(value) == '{"loss": null, "each": [1.5, [null, "x"]], "none": null, "n": 3}'
    assert parsing.json_of([1.5], (",", ":")) == "[1.5]"
