"""Systems that show a run: the commands that a person types, and the page or line in which the run can be seen first.

The trainings are scripts in `peers/`, for environments where kvps is not: `peers/watched.py` says what they train.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

SCRIPTS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Turn:
    """One turn of one system: the name that the run gets, two free ports, and a folder that is empty."""

    name: str
    port: int
    second_port: int
    folder: Path

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Command:
    """Words that are typed. The next command is typed at once, or when the port `opens` answers, or when the command
    has printed `prints`."""

    words: tuple[str, ...]
    opens: int = 0
    prints: str = ""


@dataclass(frozen=True)
class System:
    """A system, and where it shows a run.

    `environment` is its folder in the folder of environments; "" stands for this Python. If `page` is "", the last
    command shows the run itself. `shows` makes a turn the regular expression of the text that can be seen then.
    `views` is file name -> page, with {name} for the run's name, of which pictures are taken. A page that asks for a
    token in a dialog gets what the command `token` prints. A page that does not show the run after `reload_s` seconds
    is loaded again.
    """

    name: str
    environment: str
    packages: tuple[str, ...]
    commands: Callable[[Turn], list[Command]]
    page: str
    shows: Callable[[Turn], str]
    views: Mapping[str, str] = field(default_factory=dict)
    token: tuple[str, ...] = ()
    reload_s: float = 5.0


def _script(name: str, *arguments: object) -> Command:
    return Command(("python", str(SCRIPTS / name), *map(str, arguments)))


def _ray(turn: Turn) -> list[Command]:
    return [_script("watched_ray.py", turn.name, turn.port, turn.folder)]


def _rq(turn: Turn) -> list[Command]:
    url = f"redis://127.0.0.1:{turn.second_port}"
    return [
        Command(("redis-server", "--port", str(turn.second_port), "--save", ""), opens=turn.second_port),
        _script("watched_queue.py", turn.name, url),
        Command(("rq", "worker-pool", turn.name, "-n", "2", "-u", url)),
        Command(("rq-dashboard", "-u", url, "-b", "127.0.0.1", "-p", str(turn.port))),
    ]


def _tensorboard(turn: Turn) -> list[Command]:
    return [
        _script("watched_summaries.py", turn.name, turn.folder),
        Command(("tensorboard", "--logdir", f"{turn.folder}/runs", "--port", str(turn.port))),
    ]


def _optuna(turn: Turn) -> list[Command]:
    storage = f"sqlite:///{turn.folder}/study.db"
    return [
        # A dashboard that is started at the same time would make the tables of the database too, and fail.
        replace(_script("watched_study.py", turn.name, storage), prints="A new study created"),
        Command(("optuna-dashboard", storage, "--port", str(turn.port))),
    ]


def _torchft(turn: Turn) -> list[Command]:
    """Return a lighthouse with the options of `torchft_fleet`, and two learners that synchronize once a second."""
    bind = f"127.0.0.1:{turn.port}"
    asked = {
        "workers": 2,
        "local_steps": 20,
        "step_ms": 50,
        "slow": 1,
        "slow_every_s": 1,
        "folder": str(turn.folder),
        "lighthouse": f"http://{bind}",
        "name": f"{turn.name}-w",
    }
    lighthouse = ("torchft_lighthouse", "--min_replicas", "2", "--join_timeout_ms", "2000", "--bind", bind)
    learners = [_script("torchft_diloco.py", json.dumps({**asked, "rank": rank})) for rank in range(2)]
    return [Command(lighthouse, opens=turn.port), *learners]


def _kvps(turn: Turn) -> list[Command]:
    return [Command(("kvps", "up", "digits", "--job", turn.name, "--epochs", "100000"))]


def _kvps_then(*words: str) -> Callable[[Turn], list[Command]]:
    """Return the commands of a run that another command looks at, once there is something to see."""

    def commands(turn: Turn) -> list[Command]:
        looks = tuple(word.format(name=turn.name, port=turn.port) for word in words)
        return [replace(_kvps(turn)[0], prints=r"clock w0="), Command(("kvps", *looks))]

    return commands


SYSTEMS = (
    System(
        "Ray dashboard",
        "ray",
        ("ray",),
        _ray,
        "/",
        lambda turn: turn.name,  # in the command of its one job
        {
            "overview": "/#/overview",
            "jobs": "/#/jobs",
            "actors": "/#/actors",
            "cluster": "/#/cluster",
            "metrics": "/#/metrics",
        },
        ("ray", "get-auth-token"),
    ),
    System(
        "rq-dashboard",
        "rq",
        ("rq-dashboard", "rq"),
        _rq,
        "/0/view/workers",
        lambda turn: turn.name,
        {
            "queues": "/0/view/queues",
            "workers": "/0/view/workers",
            "jobs": "/0/view/jobs/{name}/finished/8/desc/1",
        },
    ),
    System(
        "TensorBoard",
        "tensorboard",
        ("tensorboard", "tensorboardX"),
        _tensorboard,
        "/",
        lambda turn: turn.name,
        {"scalars": "/#scalars", "timeseries": "/#timeseries", "histograms": "/#histograms"},
    ),
    System(
        "optuna-dashboard",
        "optuna",
        ("optuna-dashboard", "optuna"),
        _optuna,
        "/dashboard",
        lambda turn: turn.name,
        {"studies": "/dashboard", "study": "/dashboard/studies/1", "trials": "/dashboard/studies/1/trials"},
    ),
    System(
        "torchft lighthouse",
        "torchft",
        ("torchft", "torch"),
        _torchft,
        "/status",  # "/" loads it by a script of another host
        lambda turn: f"{turn.name}-w0",
        {"status": "/status", "front": "/"},
        reload_s=1.0,  # as often as that script does it
    ),
    System("kvps up", "", ("kvps",), _kvps, "", lambda turn: r"version \d+  clock w0="),
    System("kvps top", "", ("kvps", "textual"), _kvps_then("top", "{name}", "--once"), "", lambda turn: r"(?m)^ *w0 "),
    System(
        "kvps dashboard",
        "",
        ("kvps", "starlette", "uvicorn"),
        _kvps_then("dashboard", "--port", "{port}"),
        "/",
        lambda turn: turn.name,
        {"jobs": "/", "job": "/jobs/{name}", "log": "/jobs/{name}/log"},
    ),
)
