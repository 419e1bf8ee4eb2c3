"""The page and its pictures: well-formed, in need of no other file, and with what people wrote shown as text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from kvps_simulate.page import busy_picture, map_picture, page, rounds_picture
from kvps_simulate.settings import Constants, Setting
from kvps_simulate.sweep import limits, sweep

SWEPT = sweep(Setting(size=4e6, rounds=2), Constants.load(), workers=(1, 4), nodes=(1, 2))


def test_pictures_are_well_formed() -> None:
    for picture in (busy_picture(SWEPT[0]), rounds_picture(SWEPT), rounds_picture(SWEPT[:1]), map_picture(SWEPT)):
        ElementTree.fromstring(picture)


def test_the_page_needs_no_other_file() -> None:
    made = page(SWEPT[0], SWEPT, limits(SWEPT), [("what", "<b>text</b>")])
    assert "&lt;b&gt;text" in made
    assert made.count("<svg") == 3
    assert not re.search(r"<(script|link|img)|src=|href=|url\(", made)
