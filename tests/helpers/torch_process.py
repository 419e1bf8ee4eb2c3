"""Processes of tests with PyTorch: forked from one that has imported it, which takes each Python seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from helpers.paths import TESTS
from helpers.zygote import Popen


class TorchPopen(Popen):
    """A `Popen` whose zygote has imported PyTorch too, and what its examples import."""

    # torch._dynamo: the first optimizer of each process would import it, which takes as long as PyTorch itself.
    modules = ("torch", "torch.distributed", "torch._dynamo", "sklearn.datasets", "kvps.torch", "helpers.ddp")


def importing(*modules: str) -> type[Popen]:
    """Return a `Popen` whose zygote has imported PyTorch and these modules too."""
    return type("LibraryPopen", (TorchPopen,), {"modules": (*TorchPopen.modules, *modules)})


def ends_of_ddp(
    folder: Path, *what: str, program: str = "ddp.py", popen: type[Popen] = TorchPopen
) -> dict[str, dict[str, np.ndarray]]:
    """Run a program of helpers/ in two processes; return what rank 0 leaves in the folder, by the names of files."""
    command = [sys.executable, str(TESTS / "helpers" / program)]
    ranks = [
        popen([*command, rank, "2", str(folder), *what], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=300)
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return {file.stem: dict(np.load(file)) for file in folder.glob("*.npz")}
