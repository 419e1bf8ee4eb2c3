"""The weights of a version as a notebook shows them."""

from __future__ import annotations

from kvps.arrays.layout import Array
from kvps.arrays.summary import summary
from kvps.notebook import table


class Weights(dict[str, Array]):
    """Name -> array, float32. It is a dict; a notebook shows the shape, norm and range of each array."""

    def _repr_html_(self) -> str:
        rows = []
        for name, array in self.items():
            s = summary(array)
            shape = " x ".join(map(str, array.shape)) or "one number"
            rows.append((name, shape, f"{s.norm:.4g}", f"{s.least:.4g}", f"{s.greatest:.4g}", f"{s.mean:.4g}"))
        items = sum(array.size for array in self.values())
        return table(f"{items:,} weights", ("name", "shape", "norm", "least", "greatest", "mean"), rows)
