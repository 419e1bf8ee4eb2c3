"""Processes of tests with PyTorch: forked from one that has imported it, which takes each Python seconds."""

from __future__ import annotations

from helpers.zygote import Popen


class TorchPopen(Popen):
    """A `Popen` whose zygote has imported PyTorch too."""

    modules = ("torch", "torch.distributed", "kvps.torch", "helpers.ddp")


def importing(*modules: str) -> type[Popen]:
    """Return a `Popen` whose zygote has imported PyTorch and these modules too."""
    return type("LibraryPopen", (TorchPopen,), {"modules": (*TorchPopen.modules, *modules)})
