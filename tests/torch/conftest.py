"""What PyTorch's own training ends with, which tests of this folder compare kvps with."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.torch_process import ends_of_ddp


@pytest.fixture(scope="session")
def of_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """Optimizer's name -> the weights, and the buffers, with which DistributedDataParallel ends on two processes."""
    return ends_of_ddp(tmp_path_factory.mktemp("ddp"))
