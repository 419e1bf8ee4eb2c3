"""Learning-rate schedules, named as PyTorch names them.

They run over *progress*: committed contributions per worker (the sum of the vector clock / workers), so that a schedule
means the same in BSP, SSP and ASP.
"""

from kvps.schedules.base import Schedule
from kvps.schedules.composed import SequentialLR, TableLR, from_json
from kvps.schedules.formulas import (
    CosineAnnealingLR,
    ExponentialLR,
    InverseSquareRootLR,
    InverseTimeLR,
    LinearLR,
    PolynomialLR,
    StepLR,
)

__all__ = [
    "CosineAnnealingLR",
    "ExponentialLR",
    "InverseSquareRootLR",
    "InverseTimeLR",
    "LinearLR",
    "PolynomialLR",
    "Schedule",
    "SequentialLR",
    "StepLR",
    "TableLR",
    "from_json",
]
