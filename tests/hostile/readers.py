"""The readers: everything of kvps that reads what others may have written, each as one call on a scene."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from helpers.harness import gradient, log_entries
from kvps_aggregator import Aggregator
from kvps_aggregator.job_watcher import JobWatcher
from kvps_cli.look import graph, inspect, jobs, log, rollouts, status, timeline, top
from kvps_cli.prove import checkpoint, verify
from kvps_cli.train import queue
from kvps_monitor.dashboard import answers
from kvps_monitor.dashboard.frames import Look, as_json, frame
from kvps_monitor.dashboard.history import History
from kvps_monitor.live import JobWatch
from kvps_monitor.loggers.rows import RowReader
from kvps_monitor.loggers.targets import Target
from kvps_monitor.metrics.job_reader import JobReader
from kvps_monitor.spans import Traces, losses_of, spans, versions_of
from kvps_workers.queue.host import Host
from kvps_workers.queue.queue import CPU, TaskQueue
from kvps_workers.queue.task_runner import HostResources

from hostile.scene import JOB, NEIGHBOUR, HurriedClient, Scene, published
from kvps import store as store_module
from kvps.actors.watch import Watch
from kvps.errors import KvpsError, UsageError, WorkerAlive
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import listed
from kvps.history.commit_log import Log
from kvps.history.events import EventLog
from kvps.history.log_file import LogFile
from kvps.history.log_stream import LogStream
from kvps.job import Job, await_unit
from kvps.store import Store
from kvps.transport import version_reader
from kvps.transport.difference_reader import DifferenceReader
from kvps.transport.weight_reader import PullRequest

_MOST = 10_000  # entries of a log that are read: a log of a neighbour has far fewer
_MOST_LOOKS = 12

Open = Callable[[], Job]


@dataclass(frozen=True)
class Reader:
    """A reader. `run` gets the scene, and a function that returns the job.

    writes     whether it may change keys; one that may not is held to that
    seconds    when it hangs
    every      it is run on one of so many mutations
    of         "keys", "files", or the name of the only scene that it concerns
    versions   whose versions it is for: those of "workers" or of a "learner"; it refuses the others in one line
    """

    run: Callable[[Scene, Open], Any]
    writes: bool = False
    seconds: float = 5.0
    every: int = 1
    of: str = "keys"
    versions: str = ""

    def refuses(self, name: str) -> bool:
        """Return whether it is not for the versions of this scene's job."""
        return self.versions not in ("", "learner" if name in (PUBLISHED, EXPERIENCE) else "workers")


class Steps(threading.Event):
    """An event that is set once it was asked about often enough: an aggregator ends after so many steps."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def hurry() -> None:
    """Have a read that finds its version gone again and again pause as briefly as this process can."""
    version_reader._PAUSE_S = 0.0
    store_module._SETTLE_S = 0.0


# -- a program that uses the library ------------------------------------------------------------------------------


def _log(scene: Scene, job: Open) -> None:
    list(islice(job().log(), _MOST))


def _state(scene: Scene, job: Open) -> None:
    found = job()
    state = found.state()
    state.finished(found.config)
    repr(found)
    str(found.config.optimizer)


def _events(scene: Scene, job: Open) -> None:
    found = job()
    events = EventLog(found.access.client, found.access.keys)
    for event in events.newest(3) + events.newest(0):
        str(event)


def _live(scene: Scene, job: Open) -> None:
    watch = JobWatch(job())
    watch.look()
    json.dumps(watch.look().as_json())


def _spans(scene: Scene, job: Open) -> None:
    found = job()
    iterations, versions = Traces(found).read(found.state().members)
    for lane in (*iterations.values(), *versions.values()):
        list(spans(lane))


def _looks(scene: Scene, job: Open) -> None:
    found = job()
    for look in (
        found.access.reader.holders,
        found.access.reader.terms,
        LogStream(found.access).training_seconds,
        found.access.is_idle,
        found.evaluation,
    ):
        with suppress(KvpsError):
            look()
    str(found.config.metadata.foreign_launcher)


def _list(scene: Scene, job: Open) -> None:
    scene.store.jobs()
    scene.store.free_name("job")
    with redirect_stderr(io.StringIO()):
        names = list(scene.store.read_jobs(lambda job, state: job.name, lambda *_: None))
    assert NEIGHBOUR in names, "it hides the neighbour"


def _session(scene: Scene, job: Open, worker: str | None, takeover: bool = False) -> None:
    found = job()
    with found.join(worker, takeover=takeover) as session:
        if found.config.units:
            session.next_unit()
        params = session.pull()
        session.push(gradient(params, session.rank, session.round), loss=1.0)
        session.pull()


def _refused_join(scene: Scene, job: Open) -> None:
    with suppress(WorkerAlive):
        _session(scene, job, "w0")


def _waits(scene: Scene, job: Open) -> None:
    found = job()
    await_unit(found) if found.config.units else found.await_finished()


# -- a learner's model --------------------------------------------------------------------------------------------


def _watch(scene: Scene, job: Open) -> None:
    """What an actor does: a whole version, its arrays, an earlier one, and a target that is brought to it."""
    with Watch(job()) as watch:
        version = watch.update()
        repr(watch), watch.running, watch.traffic
        for _, array in watch.changed():
            array.tobytes()
        for earlier in (version - 1, version - 2):
            with suppress(KvpsError):
                _used((version, watch.at(max(0, earlier))))
        if version == (job().state().version if scene.held else -1):
            watch.load(published(0))


def _follow(scene: Scene, job: Open) -> None:
    """What an actor does that has the version before: it has the committed bits then, whatever lies there for them."""
    assert scene.held
    found, flat = job(), scene.held.flat.copy()
    if flat.size != found.layout.size:  # a watch keeps the layout that it has once read
        return
    reader = DifferenceReader(found.access, found.access.reader)
    state = found.access.reader.round_state()
    weights = reader.read(PullRequest(state, 0, found.access.reader.round_state, flat, held=scene.held.names))
    key = found.access.keys.commits
    unchanged = scene.raw.type(key) == b"stream" and scene.raw.xrange(key) == scene.content[key.encode()][1]
    if unchanged and weights.version == 4:
        assert flat.tobytes() == scene.held.newest.tobytes(), "it has other bits than those that were committed"


def _publisher(scene: Scene, job: Open) -> None:
    """The next learner: it takes the job, brings its model to the newest version, and publishes."""
    model = published(0)
    with suppress(UsageError):  # somebody holds it
        scene.store.publisher(JOB, model, wait=0).close()
    with scene.store.publisher(JOB, model, takeover=True) as policy:
        policy.load(model)
        policy.publish(published(7), loss=0.5)
        policy.publish(published(8), wait=False)


# -- experience ---------------------------------------------------------------------------------------------------


def _experience(scene: Scene, job: Open) -> None:
    its = job().rollouts
    for read in (lambda: str(its.settings), its.now, its.if_any, its.per_second, its.live, its.fates):
        with suppress(KvpsError):
            read()


def _rollouts(scene: Scene) -> None:
    for options in ({}, {"as_json": True}, {"fates": True}):
        with suppress(KvpsError):
            rollouts.rollouts(JOB, **options, redis=scene.url)


def _learner(scene: Scene, job: Open) -> None:
    """The next learner: it takes what waits, rejects some, gives some back, and publishes what it has trained on."""
    with scene.store.publisher(JOB, published(0), takeover=True) as policy:
        for _ in range(2):
            taken = policy.rollouts.take(groups=1, wait=0)
            str([item.data for item in taken])
            policy.publish(published(9), trained=taken)
        policy.rollouts.reject(policy.rollouts.take(groups=1, wait=0), "of no use")
        policy.rollouts.give_back(policy.rollouts.take(groups=1, wait=0, order="random"))


def _actor(scene: Scene, job: Open) -> None:
    """An actor of the name of the one that was killed, and another one."""
    for name in ("a0", "a1"):
        with Watch(job(), name) as watch:
            watch.load(published(0))
            watch.rollouts.room()
            for n in range(2):
                if watch.next_unit(wait=0) is not None:
                    watch.rollouts.put({"tokens": np.arange(9, dtype=np.int32), "n": n}, version=watch.version)


# -- the aggregator -----------------------------------------------------------------------------------------------


def _aggregator(scene: Scene, job: Open) -> None:
    Aggregator(job(), Steps(_MOST_LOOKS)).run(until_finished=False)


def _serve_all(scene: Scene, job: Open) -> None:
    """The neighbour has a contribution that waits: it must be committed, whatever the job holds."""
    store = Store(HurriedClient(scene.url))
    try:
        neighbour = store.job(NEIGHBOUR)
        before = neighbour.state().version
        watcher = JobWatcher(store, lambda said: None, lambda job: None)
        raised: list[BaseException] = []
        thread = threading.Thread(target=_noted(watcher.run, raised))
        thread.start()
        deadline = time.monotonic() + 3
        while neighbour.state().version == before and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)  # a poll: it must not depend on what it judges
        committed = neighbour.state().version > before
        watcher.stop()
        thread.join(8)
        if raised:
            raise raised[0]
        assert committed, "the neighbour's contribution was not committed"
        assert not thread.is_alive(), "it did not stop"
    finally:
        store.close()


def _noted(run: Callable[[], None], raised: list[BaseException]) -> Callable[[], None]:
    def noted() -> None:
        try:
            run()
        except BaseException as error:
            raised.append(error)

    return noted


# -- commands -----------------------------------------------------------------------------------------------------


@contextmanager
def _said() -> Iterator[None]:
    """Judge what a command prints: nothing in it is obeyed by a terminal."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        yield
    odd = {c for c in out.getvalue() if not c.isprintable() and c != "\n"}
    assert not odd, f"a command printed {odd}"


def _command(run: Callable[[Scene], Any]) -> Callable[[Scene, Open], None]:
    def command(scene: Scene, job: Open) -> None:
        with _said():
            run(scene)

    return command


def _inspect(scene: Scene, as_json: bool) -> None:
    inspect.inspect(JOB, "*", as_json=as_json, redis=scene.url)


def _timelines(scene: Scene) -> None:
    for name in ("t.perfetto-trace", "t.svg"):
        timeline.timeline(JOB, scene.folder / name, redis=scene.url)


def _metrics(scene: Scene, job: Open) -> None:
    reader = JobReader(job(), threading.Lock())
    for _ in range(2):  # the second reads what is new
        reader.read(lambda: None)


def _training_log(scene: Scene, job: Open) -> None:
    reader = RowReader(job(), 0, holds_newest=False, checkpoints=None)
    target = Target.parse(f"csv:{scene.folder / 'log.csv'}")
    logger, _ = target.open(job())
    try:
        logger.write(reader.read())
    finally:
        logger.close()
        (scene.folder / "log.csv").unlink(missing_ok=True)


def _save(scene: Scene) -> None:
    checkpoint.save(JOB, scene.folder, redis=scene.url)


def _verify(scene: Scene, job: Open) -> None:
    verify.proof_of(job(), checkpoints=scene.folder)


def _checkpoint(scene: Scene, job: Open) -> None:
    job().checkpoint().begin  # noqa: B018 - reading it adds up the clocks


def _dashboard(scene: Scene, job: Open) -> None:
    """What a viewer of the job is sent, and what its pages ask for."""
    watch, history = JobWatch(job()), History()
    view = watch.look()
    iterations = list(watch.kept()[0].values())
    history.add(1, [*versions_of(job()), *watch.made()], iterations, (), losses_of(job()))
    look = Look(1, 1, view, history.snapshot(), *watch.kept())
    said = frame(None, look) + frame(look, look)
    view, kept = answers.seen(scene.store, JOB, look)
    said += as_json(answers.spans(view, kept, 0, 32, 0))
    known = [] if job().config.metadata.publishes else ["w0"]
    for worker in known:
        said += frame(None, look, worker) + as_json(answers.worker_iterations(view, kept, worker))
    for worker in (None, *known):
        said += as_json(answers.events_before(scene.store, JOB, "", 5, worker))
    assert said.isascii()


def _dashboard_list(scene: Scene, job: Open) -> None:
    names = [one["job"] for one in answers.job_list(scene.store) if one["state"] != "unreadable"]
    assert NEIGHBOUR in names, "it hides the neighbour"


# -- files --------------------------------------------------------------------------------------------------------


def _files(scene: Scene) -> tuple[Any, Any]:
    files = [scene.folder / name for name in scene.files]
    saved = next(path for path in files if path.suffix == ".safetensors")
    return saved, next(path for path in files if path.suffix == ".jsonl")


def _load(scene: Scene, job: Open) -> None:
    found = Checkpoint.load(_files(scene)[0])
    _ = found.finished
    str(found.config)
    list(listed(scene.folder))


def _restore(scene: Scene, job: Open) -> None:
    made = scene.store.restore_job(Checkpoint.load(_files(scene)[0]), "restored")
    made.state()
    made.snapshot()
    for worker in islice(made.state().members, 1):
        with suppress(KvpsError):
            made.join(worker).leave(finished=False)


def _log_file(scene: Scene, job: Open) -> None:
    found = job()
    list(islice(Log(LogStream(found.access), found.state(), scene.folder).commits(), _MOST))
    list(LogFile(scene.folder, JOB, _files(scene)[1].name.split(".")[1]).entries())


def _verify_from(scene: Scene, job: Open) -> None:
    verify.proof_of(job(), checkpoints=scene.folder, start=Checkpoint.load(_files(scene)[0]))


# -- the queue ----------------------------------------------------------------------------------------------------


def _look(scene: Scene, job: Open) -> None:
    with TaskQueue(scene.url, CPU) as found:
        for row in found.look()[1]:
            _ = row.host, row.held, str(row.task)
        found.hosts()


def _take(scene: Scene, job: Open) -> None:
    with TaskQueue(scene.url, CPU) as found:
        if taken := found.take("mine"):
            found.release(taken[0], "mine", "queued", "lost", "3")
        for row in found.look()[1]:
            found.release(*row.held, "failed", "\x1b why")
        found.cancel(JOB)
        found.submit(job())
        found.beat(busy=False)
        found.depart()


def _host(scene: Scene, job: Open) -> None:
    """A host judges each task as if its own process had run it, or another host had been lost with it."""
    with TaskQueue(scene.url, CPU) as found:
        host = Host(found, scene.store, HostResources({}))
        rows = host._look()
        for row in rows:
            if row.state == "runs":
                host._put_back(row)
            if row.task:
                host._held = row.held
                host._verdict(row.task, rows)
                host._makes_way(row.task, rows[0].id)
                host._judge(row.task, 1, "\x1b why")
        host._leave()


QUEUE, PUBLISHED, EXPERIENCE = "queue", "published", "experience"
READERS = {
    "store.job": Reader(lambda scene, job: scene.opened(), every=3),
    "state": Reader(_state, every=3),
    "round_state": Reader(lambda scene, job: job().access.reader.round_state(), every=3),
    "log": Reader(_log, every=3),
    "entries": Reader(lambda scene, job: list(islice(log_entries(job()), _MOST)), every=3),
    "inbox": Reader(lambda scene, job: job().access.reader.inbox(), every=3),
    "holders and others": Reader(_looks, every=3),
    "list of jobs": Reader(_list, every=8),
    "snapshot": Reader(lambda scene, job: _used(job().snapshot()), writes=True, every=6),
    "versions": Reader(lambda scene, job: _used(next(job().versions())), writes=True, every=12),
    "report": Reader(lambda scene, job: job().report(1, {"loss": 0.5}), writes=True, every=12),
    "checkpoint": Reader(_checkpoint, writes=True, every=6),
    "waits": Reader(_waits, every=8),
    "session of w0": Reader(
        lambda scene, job: _session(scene, job, "w0", takeover=True), writes=True, every=6, versions="workers"
    ),
    "session of a living worker": Reader(_refused_join, writes=True, every=20, versions="workers"),
    "session of any": Reader(lambda scene, job: _session(scene, job, None), writes=True, every=12, versions="workers"),
    "aggregator": Reader(_aggregator, writes=True, every=6),
    "aggregator of all": Reader(_serve_all, writes=True, seconds=20, every=100),
    "verify": Reader(_verify, writes=True, every=10),
    "watch": Reader(_watch, writes=True, every=3),
    "watch of the version before": Reader(_follow, writes=True, of=PUBLISHED),
    "publisher": Reader(_publisher, writes=True, every=6, versions="learner"),
    "experience": Reader(_experience, of=EXPERIENCE),
    "learner of experience": Reader(_learner, writes=True, of=EXPERIENCE, seconds=10),
    "actor": Reader(_actor, writes=True, of=EXPERIENCE),
    "remove": Reader(lambda scene, job: scene.store.remove_job(JOB), writes=True, every=40),
    "kvps status": Reader(_command(lambda scene: status.status(JOB, redis=scene.url)), every=40),
    "kvps status --json": Reader(_command(lambda scene: status.status(JOB, as_json=True, redis=scene.url)), every=40),
    "events": Reader(_events, every=3),
    "live view": Reader(_live, every=3),
    "spans": Reader(_spans, every=3),
    "kvps graph": Reader(_command(lambda scene: graph.graph(JOB, "svg", redis=scene.url)), every=20),
    "kvps graph -o json": Reader(_command(lambda scene: graph.graph(JOB, "json", redis=scene.url)), every=40),
    "kvps rollouts": Reader(_command(_rollouts), of=EXPERIENCE),
    "kvps log": Reader(_command(lambda scene: log.log(JOB, last=0, redis=scene.url)), every=20),
    "kvps log --json": Reader(_command(lambda scene: log.log(JOB, last=9, as_json=True, redis=scene.url)), every=40),
    "kvps timeline": Reader(_command(_timelines), every=20),
    "metrics": Reader(_metrics, every=6),
    "training log": Reader(_training_log, every=6),
    "kvps inspect": Reader(_command(lambda scene: _inspect(scene, False)), writes=True, every=40),
    "kvps inspect --json": Reader(_command(lambda scene: _inspect(scene, True)), writes=True, every=40),
    "kvps top --once": Reader(_command(lambda scene: top.top(JOB, once=True, redis=scene.url)), every=20),
    "kvps top --json": Reader(_command(lambda scene: top.top(JOB, as_json=True, redis=scene.url)), every=20),
    "kvps dashboard: a job": Reader(_dashboard, every=4),
    "kvps dashboard: jobs": Reader(_dashboard_list, every=10),
    "kvps jobs": Reader(_command(lambda scene: jobs.jobs(redis=scene.url)), every=40),
    "kvps checkpoint save": Reader(_command(_save), writes=True, every=40),
    "kvps queue": Reader(_command(lambda scene: queue.show(redis=scene.url)), every=4, of=QUEUE),
    "queue: look": Reader(_look, every=2, of=QUEUE),
    "queue: take, release, cancel, submit": Reader(_take, writes=True, every=2, of=QUEUE),
    "host": Reader(_host, writes=True, every=2, of=QUEUE),
    "Checkpoint.load": Reader(_load, of="files"),
    "restore": Reader(_restore, writes=True, of="files"),
    "log in files": Reader(_log_file, of="files"),
    "verify --from": Reader(_verify_from, writes=True, of="files"),
}


def _used(found: tuple[int, dict[str, Any]]) -> None:
    for array in found[1].values():
        array.tobytes()
