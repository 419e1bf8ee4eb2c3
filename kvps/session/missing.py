"""Gradients that a contribution lacks, in a job whose parameters without a gradient stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvps.arrays.inputs import check_mapping
from kvps.arrays.layout import DTYPE, Layout
from kvps.arrays.number_ranges import ranges_of


def with_zeros(
    layout: Layout, grads: Mapping[str, Any], has: Callable[[int], bool] | None, part: str
) -> tuple[Mapping[str, Any], str]:
    """Return gradients with zeros for those that are missing, and which these are, as `number_ranges` writes them.

    Those for which `has` is true, if it is given, are not missing. A contribution of the whole model without any
    gradient is returned as it is, as where a call was forgotten. Buffers may not be missing.
    Raises LayoutMismatch for what is no mapping.
    """
    check_mapping(grads, "gradients")
    if len(grads) == len(layout.parameters):  # nearly always
        return grads, ""
    of_part = {n: p for n, p in enumerate(layout.parameters) if part in ("", p.part) and not p.buffer}
    missing = {n: p for n, p in of_part.items() if p.name not in grads and not (has and has(n))}
    if not missing or (len(missing) == len(of_part) and not part):
        return grads, ""
    return {**grads, **{p.name: np.zeros(p.shape, DTYPE) for p in missing.values()}}, ranges_of(missing)
