"""kvps: a parameter server whose whole state is a Redis keyspace.

store = kvps.connect()
job = store.create_job("name", params, staleness=0, optimizer=kvps.SGD(lr=0.1), workers=2)
with job.join("w0") as session:
    params = session.pull()
    session.push(grads)
"""

from kvps.config import JobConfig, JobSettings
from kvps.device.base import Device, open_device
from kvps.errors import (
    ContributionLate,
    CorruptData,
    DeviceFailed,
    GroupLost,
    InvalidName,
    InvalidSetting,
    InvalidTask,
    JobError,
    JobExists,
    JobNotFound,
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
from kvps.session.session import Session
from kvps.store import Store, connect
from kvps.topologies import topology

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
    "Job",
    "JobConfig",
    "JobError",
    "JobExists",
    "JobNotFound",
    "JobSettings",
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
    "RMSprop",
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
    "WorkerAlive",
    "WorkerError",
    "WorkerEvicted",
    "WrongOrder",
    "Yogi",
    "connect",
    "from_env",
    "local",
    "open_device",
    "partition",
    "schedules",
    "topology",
]
