"""The workers that train the small GPT: with kvps, or in a process group of PyTorch. Each is a process on its host."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import kvps.torch
from kvps.errors import JobNotFound
from kvps.optim import AdamW
from kvps_bench import small_gpt
from kvps_bench.roles import Role
from kvps_bench.small_gpt import Size, SmallGpt

Weights = dict[str, np.ndarray[Any, Any]]


class Inner:
    """AdamW of PyTorch with the settings of kvps's own, and its schedule."""

    def __init__(self, model: SmallGpt, like: AdamW) -> None:
        betas = (like.beta1, like.beta2)
        self.adamw = torch.optim.AdamW(model.parameters(), 1.0, betas, like.eps, like.weight_decay, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.adamw, like.lr_at)

    def step(self) -> None:
        """Step, go to the next batch's rate, and clear the gradients."""
        self.adamw.step()
        self.scheduled()
        self.adamw.zero_grad()

    def scheduled(self) -> None:
        """Go to the next batch's rate."""
        self._schedule.step()


class Beginner:
    """Trains the weights with which all begin, before the comparison, on batches that are `LARGER` times as large."""

    LARGER = 4

    def weights(self, size: Size, like: AdamW, batches: int) -> Weights:
        """Return name -> float32 array."""
        torch.set_num_threads(os.cpu_count() or 1)
        model = SmallGpt(size)
        inner = Inner(model, like)
        each = small_gpt.batches(small_gpt.text(), replace(size, batch=self.LARGER * size.batch), 4096)
        for batch in itertools.islice(each, batches):
            model.loss(batch).backward()  # type: ignore[no-untyped-call]
            inner.step()
        return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


class Trainer:
    """The model and the batches of one worker. `step` ends a batch whose loss was given to backward, and clears the
    gradients for the next."""

    def __init__(self, model: SmallGpt, size: Size, rank: int) -> None:
        torch.set_num_threads(1)
        self._model = model
        self._size = size
        self._text = small_gpt.text()
        self._batches = small_gpt.batches(self._text, size, rank)

    def train(self, number: int, loss: Callable[[torch.Tensor], torch.Tensor], step: Callable[[], Any]) -> None:
        """Train on so many batches."""
        for batch in itertools.islice(self._batches, number):
            loss(batch).backward()  # type: ignore[no-untyped-call]
            step()

    def held_out(self) -> float:
        """Return the loss of the present weights on text that nobody trains on."""
        return self._model.held_out(self._text, self._size)


class Learner(Role):
    """A worker of a kvps job, with local steps if the job takes some. After each call of `train` it has the weights of
    the newest version."""

    def __init__(self, url: str, job: str, rank: int, size: Size, inner: AdamW) -> None:
        super().__init__(url)
        found = self.store.job(job)
        model = SmallGpt(size)
        self._trainer = Trainer(model, size, rank)
        self._model = model
        self._inner = Inner(model, inner) if found.config.takes_local_steps else None
        own = self._inner.adamw if self._inner else None
        self._worker = kvps.torch.join(found, model, f"w{rank}", inner=own)

    def begin(self) -> None:
        """Pull for the first batch."""
        self._worker.pull()

    def train(self, number: int) -> None:
        """See `Trainer.train`."""
        self._trainer.train(number, self._model.loss, self._step)

    def _step(self) -> None:
        self._worker.step()
        if self._inner:
            self._inner.scheduled()
        self._worker.pull()

    def held_out(self) -> float:
        """See `Trainer.held_out`."""
        return self._trainer.held_out()

    def close(self) -> None:
        with suppress(JobNotFound):
            self._worker.leave()
        super().close()


class Keeper(Role):
    """Makes the job."""

    def create(self, weights: Weights, settings: Mapping[str, Any]) -> str:
        """Create the job of the model; return its name."""
        return self.store.create_job("gpt", weights, **settings).name


class Replica:
    """A rank of DistributedDataParallel over gloo. It is `joining` with the address at which ranks meet, on rank 0's
    host; the interface, which has the same name on each host; its rank; and the number of ranks."""

    def __init__(self, joining: tuple[str, str, int, int], size: Size, inner: AdamW, weights: Weights) -> None:
        address, interface, rank, workers = joining
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        self._model = SmallGpt(size)
        self._trainer = Trainer(self._model, size, rank)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(torch.from_numpy(weights[name].copy()))
        self._inner = Inner(self._model, inner)
        self._joining = (f"tcp://{address}", rank, workers)

    def begin(self) -> None:
        """Meet the other ranks."""
        meet, rank, workers = self._joining
        torch.distributed.init_process_group("gloo", meet, rank=rank, world_size=workers)
        self._together = DistributedDataParallel(self._model)

    def train(self, number: int) -> None:
        """See `Trainer.train`."""
        self._trainer.train(number, self._loss, self._inner.step)

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        return small_gpt.cross_entropy(self._together(batch[:, :-1]), batch)

    def held_out(self) -> float:
        """See `Trainer.held_out`."""
        return self._trainer.held_out()

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
