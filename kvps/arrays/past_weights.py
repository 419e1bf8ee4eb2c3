"""The slots in which a job keeps the weights of its last versions, for delay compensation. Pure.

    version    7    8    9
    w          w7   w8   w9
    past1      w6   w7   w8      the weights one version ago
    past2      w5   w6   w7      the weights two versions ago

They are slots as those of an optimizer's state. So they are stored, taken over, saved and replayed with the version.
"""

from __future__ import annotations

MOST_PAST = 16
"""The most versions of which weights are kept."""


def past(versions: int) -> str:
    """Return the slot with the weights so many versions ago."""
    return f"past{versions}"
