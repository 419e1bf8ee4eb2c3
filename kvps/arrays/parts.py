"""The parts of a model, which workers may pull and push alone. Pure.

Parts are named by the user, or they are *fragments*: runs of neighbouring parameters of about the same size, which
local steps synchronize in turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import cast

from kvps.arrays.layout import Layout
from kvps.errors import InvalidSetting, counted, shown
from kvps.parsing import NAME, NAME_IN_WORDS, names_like

MOST_PARTS = 4_096


def with_parts(layout: Layout, parts: Mapping[str, str | Iterable[str]] | None, fragments_: int) -> Layout:
    """Return the layout in the parts that a user names, or in so many fragments if these are 2 or more. Raises
    InvalidSetting."""
    if layout.buffer_kind and (parts is not None or fragments_ > 1):
        raise InvalidSetting("buffers are those of a whole model: leave them to each worker, or leave parts out")
    if parts is not None:
        if fragments_ > 1:
            raise InvalidSetting("fragments are parts that kvps chooses: leave parts or fragments out")
        return layout.in_parts(part_of_each(parts, layout.numbers))
    if fragments_ < 2:
        return layout
    return layout.in_parts(fragments({p.name: p.size for p in layout.parameters}, fragments_))


def part_of_each(parts: Mapping[str, str | Iterable[str]], names: Collection[str]) -> dict[str, str]:
    """Return parameter -> part. `parts` maps the name of a part to names of parameters, or patterns of them with ``*``,
    ``?`` and ``[...]`` as in a shell.

    Raises InvalidSetting unless each parameter is in exactly one part, and each pattern matches a parameter.
    """
    if not isinstance(parts, Mapping):
        raise InvalidSetting(
            f"parts must map names to names of parameters, as {{'head': 'head.*'}}, not {shown(parts)}"
        )
    part_of = dict[str, str]()
    if not 0 < len(parts) <= MOST_PARTS:
        raise InvalidSetting(f"a model has 1 to {MOST_PARTS} parts, not {len(parts)}: leave parts out for none")
    for part, patterns in parts.items():
        if not isinstance(part, str) or not NAME.fullmatch(part):
            raise InvalidSetting(f"the name of a part must be {NAME_IN_WORDS}, not {part!r}")
        for pattern in _patterns(part, patterns):
            matched = names_like(pattern, names)
            if not matched:
                raise InvalidSetting(f"part {part} names {pattern!r}, which matches no parameter")
            for name in matched:
                if part_of.setdefault(name, part) != part:
                    raise InvalidSetting(f"parameter {name!r} is in parts {part_of[name]} and {part}: put it in one")
    if missing := [name for name in names if name not in part_of]:
        raise InvalidSetting(f"parameter {missing[0]!r} is in no part: each parameter must be in one")
    return part_of


def _patterns(part: str, patterns: object) -> Iterator[str]:
    is_one = isinstance(patterns, str) or not isinstance(patterns, Iterable)
    each: Iterable[object] = (patterns,) if is_one else cast(Iterable[object], patterns)
    for pattern in each:
        if not isinstance(pattern, str):
            raise InvalidSetting(f"part {part} must have names of parameters or patterns of them, not {pattern!r}")
        yield pattern


def fragments(sizes: Mapping[str, int], number: int) -> dict[str, str]:
    """Return parameter -> fragment, "0" to `number` - 1: runs of neighbours of about even sizes: no fragment has
    more than its share and the largest parameter. `sizes` are in items. Raises InvalidSetting for more fragments than
    parameters.
    """
    if number > len(sizes):
        raise InvalidSetting(
            f"fragments must not exceed the {counted(len(sizes), 'parameter')} of the model, it is {number}"
        )
    whole, end, fragment, out = sum(sizes.values()), 0, 0, dict[str, str]()
    for left, (name, size) in zip(range(len(sizes), 0, -1), sizes.items(), strict=True):
        is_due = (end + size / 2) * number >= whole * (fragment + 1)
        must = left < number - fragment  # or a later fragment would be empty
        if out and fragment + 1 < number and (is_due or must):
            fragment += 1
        out[name] = str(fragment)
        end += size
    return out


def fragment_of(round_: int, number: int) -> str:
    """Return the fragment that a worker pushes in its round, counted from 0: one after another."""
    return str(round_ % number)
