"""What a learner gives for the next version of its job."""

from __future__ import annotations

from dataclasses import dataclass

from kvps.arrays.layout import Array


@dataclass
class Given:
    """The weights of the next version, (layout.size,) words; and the `state` that is kept with it, as `items.encode`
    makes it, b"" for none."""

    flat: Array
    state: bytes = b""
