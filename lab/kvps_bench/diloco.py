"""`kvps_bench diloco`: a small GPT by local steps, by a gradient a step, and by DistributedDataParallel over gloo.

All train on the same batches with AdamW at the same rate. The links are held to a rate for local steps and for
DistributedDataParallel, which are compared in time. A gradient a step is compared in loss and bytes alone, so its links
are not held.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from kvps.optim import AdamW, Optimizer
from kvps.optim.schedules import CosineAnnealingLR
from kvps_bench.crew import Member, Place, crew, together
from kvps_bench.hosts import Host, Network, NoHosts
from kvps_bench.layouts import LAYOUTS
from kvps_bench.result import NOT_INSTALLED, Bar, Figures, Result, Row, machine
from kvps_bench.roles import Aggregator
from kvps_bench.turns import Ratio, Times

_BAR = 16
_PORT = 6401
_LOOKS = 5  # of DistributedDataParallel, in as many batches as a round has
OUTER = "sgd:lr=0.7,momentum=0.9,nesterov=true"
BATCHES = 1500
SIZE = ("layers", "width", "context", "batch")
_LOSS, _BYTES, _FASTER = 1.02, 1 / 40, 10.0
LOCAL, EACH, DDP = "kvps, local steps", "kvps, a gradient a step", "DistributedDataParallel, gloo"
AGAINST = {"each": EACH, "ddp": DDP}


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    batches      of each worker
    local_steps  between two pulls
    target       the held-out loss, in nats a character, whose time is taken
    lr           AdamW's rate, with which all train; it falls to a tenth
    size         keywords of `small_gpt.Size`
    warm_up      batches of one process, before the comparison, that make the weights with which all begin
    against      what local steps are compared with: of AGAINST
    """

    workers: int
    batches: int
    local_steps: int
    target: float
    mbit: float
    lr: float
    outer: Optimizer
    layout: str
    size: Mapping[str, int]
    warm_up: int
    against: Sequence[str]

    def adamw(self, batches: int) -> AdamW:
        """Return the optimizer of so many batches, whose rate falls to a tenth as a cosine."""
        return AdamW(lr=CosineAnnealingLR(self.lr, max(1, batches), self.lr / 10))


class Look(NamedTuple):
    """The held-out loss after so many batches of each worker and seconds of training, and all links' bytes so far."""

    batches: int
    seconds: float
    loss: float
    nbytes: int


class Curve(NamedTuple):
    """The looks of one case, in order."""

    looks: Sequence[Look]

    def seconds_to(self, loss: float) -> float | None:
        """Return the time of the first look at this loss or less; None if there is none."""
        return next((look.seconds for look in self.looks if look.loss <= loss), None)

    def times(self) -> Times:
        """Return the seconds between two looks."""
        ends = [0.0, *(look.seconds for look in self.looks)]
        return Times((tuple(b - a for a, b in pairwise(ends)),))


def measure(place: Place, setting: Setting, say: Callable[[str], None] = lambda _: None) -> Result:
    """Train each way, one after another, and compare them."""
    curves: dict[str, Curve] = {}
    why = "" if importlib.util.find_spec("torch") else NOT_INSTALLED
    if not why:
        try:
            curves = _curves(setting, say)
        except NoHosts as refused:
            why = str(refused)
    asked = [LOCAL, *(AGAINST[name] for name in setting.against)]
    rows = [_row(setting, case, curves.get(case), why) for case in asked]
    return Result("diloco", 1, rows, _bars(setting, curves, why), machine(place.store.client), _notes(setting))


def _curves(setting: Setting, say: Callable[[str], None]) -> dict[str, Curve]:
    from kvps_bench import learners, small_gpt  # PyTorch is an extra

    size, out = small_gpt.Size(**setting.size), {}
    with crew((learners.Beginner,)) as (beginner,):
        weights = beginner("weights", size, setting.adamw(setting.warm_up), setting.warm_up)
    with Network(setting.workers + 1, setting.mbit * 1e6) as hosts:
        say(LOCAL)
        with _kvps(setting, size, weights, hosts, setting.local_steps) as members:
            out[LOCAL] = _trained(setting, hosts, members, say, setting.local_steps)
        if "ddp" in setting.against:
            say(DDP)
            with _ddp(setting, size, weights, hosts) as members:
                every = max(1, setting.local_steps // _LOOKS)
                out[DDP] = _trained(setting, hosts, members, say, every, setting.target)
    if "each" in setting.against:
        say(EACH)
        with Network(setting.workers + 1) as hosts, _kvps(setting, size, weights, hosts, 1) as members:
            out[EACH] = _trained(setting, hosts, members, say, setting.local_steps)
    return out


@contextmanager
def _kvps(setting: Setting, size: Any, weights: Any, hosts: Sequence[Host], local_steps: int) -> Iterator[list[Member]]:
    """Yield the workers of a job: with local steps their AdamW is the inner optimizer, else the job's."""
    from kvps_bench import learners  # PyTorch is an extra

    with ExitStack() as stack:
        ground = stack.enter_context(LAYOUTS[setting.layout].opened(hosts))
        settings: dict[str, Any] = {"workers": setting.workers, "shards": len(ground.aggregators)}
        settings |= {"transport": "redis", "local_steps": local_steps}
        inner = setting.adamw(setting.batches)
        settings["optimizer"] = setting.outer if local_steps > 1 else inner
        with crew((ground.aggregators[0], learners.Keeper, ground.url)) as (keeper,):
            job = keeper("create", weights, settings)
        for number, host in enumerate(ground.aggregators):
            own = (None, ground.near[number]) if ground.near else ([number],)
            stack.enter_context(crew((host, Aggregator, ground.url, job, *own)))
        learning = [(host, learners.Learner, ground.url, job, rank, size, inner) for rank, host in _placed(hosts)]
        yield stack.enter_context(crew(*learning))


@contextmanager
def _ddp(setting: Setting, size: Any, weights: Any, hosts: Sequence[Host]) -> Iterator[list[Member]]:
    from kvps_bench import learners  # PyTorch is an extra

    meet, inner = f"{hosts[0].address}:{_PORT}", setting.adamw(setting.batches)
    ranks = [
        (host, learners.Replica, (meet, host.interface, rank, setting.workers), size, inner, weights)
        for rank, host in _placed(hosts)
    ]
    with crew(*ranks) as members:
        yield members


def _placed(hosts: Sequence[Host]) -> Iterator[tuple[int, Host]]:
    """Yield each worker's rank and host; the last host has none."""
    return enumerate(hosts[:-1])


def _trained(
    setting: Setting,
    hosts: Sequence[Host],
    members: list[Member],
    say: Callable[[str], None],
    every: int,
    until: float | None = None,
) -> Curve:
    """Train all batches, or until the held-out loss is so small, with a look after `every` batches."""
    together(members, "begin")
    looks, seconds, before = list[Look](), 0.0, _counted(hosts)
    for done in range(0, setting.batches, every):
        number, began = min(every, setting.batches - done), time.perf_counter()
        together(members, "train", number)
        seconds += time.perf_counter() - began
        looks.append(Look(done + number, seconds, members[0]("held_out"), _counted(hosts) - before))
        say(f"  {looks[-1].batches} batches, {seconds:.1f} s, held-out loss {looks[-1].loss:.4f}")
        if until is not None and looks[-1].loss <= until:
            break
    return Curve(looks)


def _counted(hosts: Sequence[Host]) -> int:
    """Return the bytes that all links have carried so far, in both directions."""
    return sum(sum(host.counted()) for host in hosts)


def _row(setting: Setting, case: str, curve: Curve | None, why: str) -> Row:
    settings: Figures = {
        "workers": setting.workers,
        "local_steps": setting.local_steps if case == LOCAL else 1,
        "mbit": setting.mbit if case != EACH else "any",
    }
    if curve is None:
        return Row(case, "tcp", settings, why=why)
    last, to = curve.looks[-1], curve.seconds_to(setting.target)
    more: Figures = {
        "batches": last.batches,
        "loss": round(last.loss, 4),
        "s_to_target": round(to, 1) if to is not None else "not reached",
        "mb": round(last.nbytes / 1e6, 1),
    }
    return Row(case, "tcp", settings, curve.times(), more)


def _bars(setting: Setting, curves: dict[str, Curve], why: str) -> list[Bar]:
    bars = []
    if "each" in setting.against:
        loss = nbytes = None
        if curves:
            local, each = curves[LOCAL].looks[-1], curves[EACH].looks[-1]
            loss, nbytes = Ratio.of([local.loss / each.loss]), Ratio.of([local.nbytes / each.nbytes])
        bars.append(Bar(_BAR, f"held-out loss at equal tokens: {LOCAL} over {EACH}", True, _LOSS, loss, why))
        bars.append(Bar(_BAR, f"bytes on all links: {LOCAL} over {EACH}", True, _BYTES, nbytes, why))
    if "ddp" in setting.against:
        what, faster = f"time to a loss of {setting.target:g}: {DDP} over {LOCAL}", None
        if curves:
            mine, theirs = curves[LOCAL].seconds_to(setting.target), curves[DDP].seconds_to(setting.target)
            faster = Ratio.of([theirs / mine]) if mine and theirs else None
            why = f"not both reached a loss of {setting.target:g}"
        bars.append(Bar(_BAR, what, False, _FASTER, faster, why))
    return bars


def _notes(setting: Setting) -> tuple[str, ...]:
    return (
        f"Times are those from one look at the held-out loss to the next: {setting.local_steps} batches of each worker "
        f"with kvps, {max(1, setting.local_steps // _LOOKS)} with DistributedDataParallel. They leave out the looks. "
        f"Hosts are namespaces of this machine, which share its cores. Where links have a rate, tc holds each to it, "
        f"in both directions.",
        "The model and its batches are small enough for a few cores to do the work of all workers, so that the links "
        "decide. With less time for communication in a step, less is gained.",
        "MB are those of all links in both directions, from the end of the first pull to the last look.",
    )
