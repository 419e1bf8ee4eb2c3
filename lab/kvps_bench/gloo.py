"""torch.distributed's all_reduce over gloo: gradients in buckets of 25 MiB, as DistributedDataParallel sends them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from kvps_bench.roles import LR, sizes

_BUCKET_ITEMS = (25 << 20) // 4


class GlooWorker:
    """A rank. Its first gradient is the constant rank + 1, so the weights show whether every round was made."""

    def __init__(self, nbytes: int, tensors: int, ranks: tuple[int, int], address: str, port: int, interface: str):
        """`ranks` is this one's number, and how many there are; rank 0 listens at `address`."""
        torch.set_num_threads(1)
        # Only the first round reads them and meets the other ranks: here a rank would wait for those not started yet.
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": interface}
        self._rank, self._workers = ranks
        self._rounds = 0
        buckets = _buckets(sizes(nbytes, tensors))
        self._buckets = [torch.full((sum(bucket),), float(self._rank + 1)) for bucket in buckets]
        parts = zip(self._buckets, buckets, strict=True)
        self._gradients = [gradient for flat, bucket in parts for gradient in torch.split(flat, bucket)]
        self._weights = [torch.zeros_like(gradient) for gradient in self._gradients]

    def rounds(self, number: int) -> list[float]:
        """Return the seconds of each of `number` rounds. All ranks must be called at the same time."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=self._rank, world_size=self._workers)
        took = []
        for _ in range(number):
            began = time.perf_counter()
            self._round()
            took.append(time.perf_counter() - began)
        self._rounds += number
        return took

    def _round(self) -> None:
        waiting: list[Any] = [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]
        for work, bucket in zip(waiting, self._buckets, strict=True):
            work.wait()
            bucket /= self._workers  # the mean; so is the next round's mean of these, and no gradient needs a refill
        torch._foreach_add_(self._weights, self._gradients, alpha=-LR)

    def weights(self) -> tuple[int, float, float]:
        """Return how many rounds were made, and the least and greatest of the weights."""
        return self._rounds, min(float(w.min()) for w in self._weights), max(float(w.max()) for w in self._weights)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _buckets(items: list[int]) -> list[list[int]]:
    """Group neighbouring arrays, as many as fit into a bucket."""
    buckets: list[list[int]] = [[]]
    for size in items:
        if buckets[-1] and sum(buckets[-1]) + size > _BUCKET_ITEMS:
            buckets.append([])
        buckets[-1].append(size)
    return buckets
