"""How a command finds its server and its job: it starts the private server, or waits for a missing server or job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import kvps
from kvps.connection.urls import redacted
from kvps.errors import InvalidSetting, JobNotFound, KvpsError, NoServer, ServerLost, UsageError, counted
from kvps.job import Job, readable
from kvps.protocol.job_state import State
from kvps.server import private_server
from kvps.store import Store
from kvps_cli import finished_runs, options
from kvps_cli.output import say, seconds_text

_POLL_S = 0.3


@dataclass(frozen=True)
class ServerOptions(options.SharedOptions):
    """The options of a command that may start the private server."""

    redis: options.Redis = None
    listen: options.Listen = None
    data_dir: options.DataDir = None

    @property
    def stays_s(self) -> float:
        """For how many seconds a private server that the command starts stays after its last use."""
        return 0.0


@dataclass(frozen=True)
class RunServerOptions(ServerOptions):
    """The options of a command that makes a job and ends when it is trained."""

    server_stays: options.ServerStays = None

    @property
    def stays_s(self) -> float:
        # A command that comes later could not open a port, or use the directory, on a server that runs already.
        unasked = 0.0 if self.listen or self.data_dir else options.SERVER_STAYS_S
        return unasked if self.server_stays is None else self.server_stays


@contextmanager
def serving_store(server: ServerOptions, quiet: bool, joinable: bool = True) -> Iterator[Store]:
    """Open a store for a command that may start the private server, and print how to look inside.

    With `joinable`, workers on other machines may join, and with `listen` the command prints how.
    """
    redis, listen = server.redis, server.listen
    if redis and (listen or server.data_dir):
        option = "--listen" if listen else "--data-dir"
        raise InvalidSetting(f"{option} is for the private server: leave it out with --redis")
    with kvps.connect(redis, listen, server.data_dir, stays_s=server.stays_s) as store:
        if not quiet:
            private, option = ("", f" --redis {redacted(redis)}") if redis else ("private ", "")
            stays = f"{seconds_text(store.stays_s)} after its last use" if store.stays_s else "when nobody uses it"
            end = f" (ends {stays})" if store.ends_unused else ""
            say(f"{private}server {store.server_name} at {redacted(store.url)}{end}")
            say(f"look inside: kvps cli{option}")
            if listen and joinable:
                say(f"join from elsewhere: {private_server.join_line(store.url, listen)}")
            elif listen:
                say(f"look from elsewhere: KVPS_REDIS_URL={private_server.tcp_url(store.url, listen)} kvps jobs")
        lost = False
        try:
            yield store
        except (NoServer, ServerLost):
            lost = True
            raise
        finally:
            if server.stays_s and not lost and finished_runs.may_stay(store):
                store.keep_server()
            if store.hands_over_server and not lost:  # this command started it, and others use it
                with suppress(KvpsError):  # the server may have ended meanwhile
                    jobs = ", ".join(busy_jobs(store))
                    others = f"others ({jobs})" if jobs else "others"
                    say(f"the private server keeps running for {others}; kvps server stop ends it")


def busy_jobs(store: Store) -> list[str]:
    """Return the names of the jobs that have active workers."""
    names = store.read_jobs(lambda job, state: job.name if state.active else None, report_once())
    return [name for name in names if name]


def existing_store(redis: str | None) -> Store:
    """Open a store for a command that starts no server. Raises NoServer if none runs."""
    return kvps.connect(existing_url(redis))


@contextmanager
def existing_job(redis: str | None, name: str | None) -> Iterator[Job]:
    """Open a job on a server that runs, without a name its only one. In the block, errors about what is stored for the
    job name it."""
    with existing_store(redis) as store:
        name = name or only_job(store)
        with readable(name):
            yield store.job(name)


def only_job(store: Store) -> str:
    """Return the name of the only job. Raises JobNotFound, InvalidSetting."""
    names = store.jobs()
    if not names:
        raise JobNotFound("no jobs are on this server: start one with kvps up digits or kvps create TASK --job NAME")
    if len(names) > 1:
        raise InvalidSetting(f"this server has several jobs ({', '.join(names)}): say which one")
    return names[0]


def existing_url(redis: str | None) -> str:
    """Return the URL that was given, or that of the private server. Raises NoServer if none runs."""
    url = redis or private_server.found()
    if url is None:
        raise NoServer("no private server runs: start one with kvps up, kvps aggregator start or kvps server start")
    return url


def wait_for_server(redis: str | None) -> None:
    """Wait until the private server runs, and say so once. Return at once if `redis` is a URL."""
    if redis or private_server.running():
        return
    say("no private server runs yet: start one with kvps aggregator start, kvps worker or kvps server start")
    while not private_server.running():
        time.sleep(_POLL_S)  # no server runs yet that could send a notice


def wait_for_job(store: Store, name: str | None, quiet: bool = False) -> Job:
    """Wait for the job of that name, or without a name for the only job that is open to all workers; say so once.

    Raises InvalidSetting if several jobs are open, UsageError for a job that a learner publishes.
    """
    announced, pass_over = False, report_once()
    while True:
        if name is not None:
            with suppress(JobNotFound):
                return _trained(read_job(store, name)[0])
        else:
            joinable = [job for job in store.read_jobs(_joinable, pass_over) if job]
            if len(joinable) == 1:
                return joinable[0]
            if joinable:
                names = ", ".join(job.name for job in joinable)
                raise InvalidSetting(f"several jobs are open ({names}): choose one with --job")
        if not announced and not quiet:
            wanted = f"job {name!r}" if name else "a job"
            say(f"waiting for {wanted}; create it with kvps create TASK --job {name or 'NAME'}")
            announced = True
        time.sleep(_POLL_S)  # the set of jobs is for listing only, and announces nothing


def _trained(job: Job) -> Job:
    """Return a job that workers train. Raises UsageError for one that a learner publishes."""
    if job.config.metadata.publishes:
        raise UsageError(
            f"job {job.name!r} takes no worker and no aggregator: a learner publishes it, and kvps.connect().watch("
            f"{job.name!r}) reads its versions"
        )
    return job


def _joinable(job: Job, state: State) -> Job | None:
    noted = job.config.metadata
    return job if noted.task and not noted.foreign_launcher and not state.finished(job.config) else None


def report_once() -> Callable[[str, KvpsError], None]:
    """Return a function that says why a job is passed over, each reason once."""
    reported = set[str]()

    def pass_over(_: str, error: KvpsError) -> None:
        if str(error) not in reported:
            reported.add(str(error))
            say(f"passed over: {error}")

    return pass_over


def read_job(store: Store, name: str) -> tuple[Job, State]:
    """Return the job of that name and its state. Raises JobNotFound, CorruptData."""
    with readable(name):
        job = store.job(name)
        return job, job.state()


def start_of(job: Job, worker: str = "") -> str:
    """Return how a worker of a job is started, under a free id or under this one."""
    if job.config.metadata.task:
        return f"kvps worker --job {job.name}{worker and f' --id {worker}'}"
    return f"its own script, which joins with job.join({repr(worker) if worker else ''})"


def announce(job: Job, quiet: bool = False) -> None:
    """Say which job this is, and how it trains."""
    if not quiet:
        c = job.config
        task = c.metadata.task or "made in Python"
        say(f"job {job.name}: {task}, {c.mode}, {counted(c.workers, 'worker')}, {c.optimizer}")
