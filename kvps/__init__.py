"""kvps: a parameter server whose whole state is a Redis keyspace.

store = kvps.connect()
job = store.create_job("name", params, staleness=0, optimizer=kvps.SGD(lr=0.1), workers=2)
with job.join("w0") as session:
    params = session.pull()
    session.push(grads)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvps.errors import (
    ContributionLate,
    CorruptData,
    DeviceFailed,
    GroupLost,
    InvalidName,
    InvalidSetting,
    InvalidTask,
    ItemsRefused,
    JobError,
    JobExists,
    JobNotFound,
    JobStopped,
    JobSuspended,
    KvpsError,
    LayoutMismatch,
    LeaseLost,
    NoServer,
    NotFinite,
    ServerError,
    ServerFull,
    ServerLost,
    ServerUnfit,
    TaskFailed,
    TooManyClients,
    UsageError,
    WorkerAlive,
    WorkerError,
    WorkerEvicted,
    WrongOrder,
)

if sys.platform == "win32":  # it has no Unix sockets, locks of files and memory as kvps uses them
    _WHY = "kvps runs on Linux and macOS, and on Windows inside WSL: wsl --install, and install kvps there"
    raise SystemExit(f"kvps: error: {_WHY}") if sys.argv[0] == "-m" or "kvps" in sys.argv[0] else ImportError(_WHY)

if TYPE_CHECKING:  # what `__getattr__` imports, for type checkers and editors
    from kvps.actors.publisher import Publisher
    from kvps.actors.taking import Item
    from kvps.actors.watch import Watch
    from kvps.config import JobConfig, JobSettings
    from kvps.config.rollouts import Rollouts
    from kvps.device.base import Device, open_device
    from kvps.history.checkpoint import Checkpoint
    from kvps.job import Job
    from kvps.launch import RunContext, from_env
    from kvps.local_job import LocalJob, local
    from kvps.optim import (
        SGD,
        Adadelta,
        Adagrad,
        Adam,
        Adamax,
        AdamW,
        DelayedNesterov,
        Lion,
        NAdam,
        Optimizer,
        ParameterGroup,
        RMSprop,
        Yogi,
        schedules,
    )
    from kvps.partitions import partition
    from kvps.session.batches import batches
    from kvps.session.session import Session
    from kvps.store import Store, connect

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Checkpoint",
    "ContributionLate",
    "CorruptData",
    "DelayedNesterov",
    "Device",
    "DeviceFailed",
    "GroupLost",
    "InvalidName",
    "InvalidSetting",
    "InvalidTask",
    "Item",
    "ItemsRefused",
    "Job",
    "JobConfig",
    "JobError",
    "JobExists",
    "JobNotFound",
    "JobSettings",
    "JobStopped",
    "JobSuspended",
    "KvpsError",
    "LayoutMismatch",
    "LeaseLost",
    "Lion",
    "LocalJob",
    "NAdam",
    "NoServer",
    "NotFinite",
    "Optimizer",
    "ParameterGroup",
    "Publisher",
    "RMSprop",
    "Rollouts",
    "RunContext",
    "ServerError",
    "ServerFull",
    "ServerLost",
    "ServerUnfit",
    "Session",
    "Store",
    "TaskFailed",
    "TooManyClients",
    "UsageError",
    "Watch",
    "WorkerAlive",
    "WorkerError",
    "WorkerEvicted",
    "WrongOrder",
    "Yogi",
    "batches",
    "connect",
    "from_env",
    "local",
    "open_device",
    "partition",
    "schedules",
]

_HOMES = {  # a module, and the names here that it defines; the others are those of kvps.optim
    "kvps.actors.publisher": ("Publisher",),
    "kvps.actors.taking": ("Item",),
    "kvps.config.rollouts": ("Rollouts",),
    "kvps.actors.watch": ("Watch",),
    "kvps.config": ("JobConfig", "JobSettings"),
    "kvps.device.base": ("Device", "open_device"),
    "kvps.history.checkpoint": ("Checkpoint",),
    "kvps.job": ("Job",),
    "kvps.launch": ("RunContext", "from_env"),
    "kvps.local_job": ("LocalJob", "local"),
    "kvps.partitions": ("partition",),
    "kvps.session.batches": ("batches",),
    "kvps.session.session": ("Session",),
    "kvps.store": ("Store", "connect"),
}
_HOME_OF = {name: "kvps.optim" for name in __all__ if name not in globals()}
_HOME_OF |= {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is first used here (PEP 562): a process pays for the modules that it uses, and for no others."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
