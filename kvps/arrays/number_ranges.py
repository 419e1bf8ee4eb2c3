"""A set of parameters as a short text: their numbers in the layout, as ``0-3,7``. Pure.

Counts of parameters are a mapping from such texts: ``{"0-3,7": 12}``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import groupby

from kvps.errors import CorruptData, LayoutMismatch, shown
from kvps.parsing import Fields

RANGES = r"[0-9]{1,7}(?:-[0-9]{1,7})?(?:,[0-9]{1,7}(?:-[0-9]{1,7})?)*"
"""The text, as a regular expression."""
MOST_RANGES = 1 << 16
"""The most characters of such a text."""
_MOST = 1 << 20  # as many parameters as a layout may have


def ranges_of(numbers: Iterable[int]) -> str:
    """Return the text of a set of numbers. Raises LayoutMismatch if it is longer than `MOST_RANGES`."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        each = [number for _, number in run]
        runs.append(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}")
    text = ",".join(runs)
    if len(text) > MOST_RANGES:
        raise LayoutMismatch(
            f"the parameters without a gradient are in {len(runs):,} runs, and a contribution names fewer: give zeros "
            f"for some of them, or create the job with missing='zeros'"
        )
    return text


@lru_cache(maxsize=256)
def numbers_in(text: str) -> frozenset[int]:
    """Return the set that a text of `RANGES` has. Raises CorruptData unless its numbers ascend, and are those of
    parameters."""
    numbers, end = list[int](), -1
    for run in text.split(","):
        low, _, high = run.partition("-")
        first, last = int(low), int(high or low)
        if not end < first <= last < _MOST:
            raise CorruptData(f"parameters that a contribution lacks: {shown(text)} is no list of ascending numbers")
        numbers += range(first, last + 1)
        end = last
    return frozenset(numbers)


def counts_as_text(counts: Mapping[int, int]) -> dict[str, int]:
    """Return counts of parameters as JSON may have them: text of a set -> count."""
    numbers = defaultdict[int, list[int]](list)
    for number, count in counts.items():
        numbers[count].append(number)
    return {ranges_of(each): count for count, each in numbers.items()}


def counts_in(fields: Fields, most: int, parameters: int) -> dict[int, int]:
    """Return the counts, 1 to `most`, that `counts_as_text` wrote of so many parameters. Raises CorruptData."""
    counts = dict[int, int]()
    for text in fields:
        if not re.fullmatch(RANGES, text) or max(numbers := numbers_in(text)) >= parameters:
            raise CorruptData(f"counts of parameters have {shown(text)}, and that names none")
        counts |= dict.fromkeys(numbers, fields.whole(text, 1, most))
    return counts


@lru_cache(maxsize=64)
def in_all(texts: tuple[str, ...]) -> frozenset[int]:
    """Return the numbers that are in each of the sets, of one or more texts. Raises CorruptData as `numbers_in`."""
    return frozenset.intersection(*map(numbers_in, texts))
