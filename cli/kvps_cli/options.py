"""The options that several commands share, and what checks their values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from kvps.errors import InvalidSetting, install
from kvps_cli import completion

FILES, SERVER = "Files", "Server"  # option groups of a help text, beside those of `kvps.config.Spec.group`

TaskName = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="digits, or MODULE:ATTRIBUTE of a module in this directory.",
        autocompletion=completion.tasks,
    ),
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=completion.jobs)]
AnyJobName = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]",
        help="Name of the job. Without it the only one.",
        show_default=False,
        autocompletion=completion.jobs,
    ),
]
NewJobName = Annotated[
    str | None, typer.Option("--job", metavar="NAME", help="Name of the job.", show_default="the task's")
]
Slow = Annotated[
    list[str] | None, typer.Option(metavar="ID=Nx", help="Slow a worker down, as in w0=5x. May be given several times.")
]
Prefetch = Annotated[
    bool,
    typer.Option(
        "--prefetch",
        help="In SSP and ASP: fetch the next weights while the worker computes.",
        rich_help_panel="Arrays",
        hidden=True,
    ),
]

_server_option = partial(typer.Option, rich_help_panel=SERVER)
Redis = Annotated[
    str | None,
    _server_option(
        "--redis",
        envvar="KVPS_REDIS_URL",
        metavar="URL",
        help="Redis to use (redis://, rediss://, unix://, redis+sentinel://).",
        show_default="your private server",
    ),
]
QueueRedis = Annotated[
    str | None,
    typer.Option(
        "--queue-redis",
        envvar="KVPS_QUEUE_URL",
        metavar="URL",
        help="Redis that holds the queue, if the jobs are in another one.",
        rich_help_panel="Queue",
    ),
]
Listen = Annotated[
    str | None,
    _server_option(
        metavar="HOST:PORT",
        help="Let the private server listen on TCP too, behind a password, for workers on other machines.",
    ),
]
DataDir = Annotated[
    Path | None,
    _server_option(
        metavar="DIR",
        help="Keep the private server's data in this directory, and load it from there at the next start.",
        show_default="it keeps nothing",
    ),
]

SERVER_STAYS_S = 600.0
ServerStays = Annotated[
    float | None,
    _server_option(
        "--server-stays",
        envvar="KVPS_SERVER_STAYS",
        metavar="SECONDS",
        min=0,
        max=1e6,
        help="For how long the private server stays after its last use, with the jobs of finished runs, so that you "
        "can look at them. 0 ends it with the command.",
        show_default=f"{SERVER_STAYS_S:g}, or 0 with --listen or --data-dir",
        hidden=True,
    ),
]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, help="Print the log of kvps, with times. -vv adds details."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

DEFAULT_CHECKPOINTS = Path("checkpoints")
LOOPBACK = "127.0.0.1"


class SharedOptions:
    """Options that several commands take: a dataclass, each field of which is an option. See `with_shared`."""

    @classmethod
    def parameters(cls) -> list[Parameter]:
        """Return the options."""
        return list(signature(cls, eval_str=True).parameters.values())

    @classmethod
    def of(cls, context: typer.Context, values: Mapping[str, Any]) -> Self:
        """Return the options with their values. Raises InvalidSetting."""
        return cls(**values)


def with_shared(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is annotated as SharedOptions by these options."""
    annotations = {name: p.annotation for name, p in signature(command, eval_str=True).parameters.items()}
    kinds = {n: a for n, a in annotations.items() if isinstance(a, type) and issubclass(a, SharedOptions)}
    shared = {name: kind.parameters() for name, kind in kinds.items()}

    def take(context: typer.Context, values: dict[str, Any]) -> None:
        for name, parameters in shared.items():
            given = {p.name: values.pop(p.name) for p in parameters}
            values[name] = kinds[name].of(context, given)

    return redeclared(command, lambda taken: [option for p in taken for option in shared.get(p.name, [p])], take)


def redeclared(
    command: Callable[..., None],
    options: Callable[[Iterable[Parameter]], Iterable[Parameter]],
    take: Callable[[typer.Context, dict[str, Any]], object],
) -> Callable[..., None]:
    """Have Typer see the `options` that are made of the parameters of a command. `take` is called before the command
    with the values of these options, and turns them into the values of the parameters."""
    taken = signature(command, eval_str=True).parameters

    @wraps(command)
    def run(context: typer.Context, **values: Any) -> None:
        take(context, values)
        if "context" in taken:
            values["context"] = context
        command(**values)

    shown = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    shown += [p.replace(kind=Parameter.KEYWORD_ONLY) for p in options(taken.values()) if p.name != "context"]
    run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in shown}
    return run


def confirm(command: str, question: str, yes: bool) -> None:
    """Ask a person, unless the answer is known, and end the command if it is no. Raises InvalidSetting if nobody can
    answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidSetting(f"{command} asks: {question}? But stdin is no terminal: give --yes")
    typer.confirm(f"{question}?", abort=True)


def existing_directory(description: str) -> Any:
    """Return an option whose value must be a directory that exists."""
    return typer.Option(metavar="DIR", exists=True, file_okay=False, help=description)


@contextmanager
def extra(name: str, why: str, *libraries: str) -> Iterator[None]:
    """Say which extra to install if a library is missing that is imported in the block. Raises InvalidSetting."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in libraries:
            raise
        raise InvalidSetting(f"{why}: {install(name)}") from None


def slow_factors(options: list[str], workers: int) -> dict[str, float]:
    """Return worker -> slow-down factor, for the workers that the options name. Raises InvalidSetting."""
    factors = {}
    for option in options:
        worker, equals, factor = option.partition("=")
        if not equals or worker not in {f"w{i}" for i in range(workers)}:
            raise InvalidSetting(
                f"--slow wants ID=Nx with an ID from w0 to w{workers - 1}, as in w0=5x, not {option!r}"
            )
        factors[worker] = parse_slow(factor)
    return factors


def parse_slow(text: str) -> float:
    """Return 5.0 for "5x" or "5". Raises InvalidSetting."""
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= 1000:
        raise InvalidSetting(f"--slow wants a factor from 1x to 1000x, not {text!r}")
    return factor


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the user gave this option; the task or the script may choose what the user left out."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_file(option: str, path: Path) -> None:
    """Raise InvalidSetting before long work if the file that an option names cannot be written after it."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise InvalidSetting(f"{option} {path}: there is no directory {folder}")
    if path.is_dir():
        raise InvalidSetting(f"{option} {path} is a directory: give the name of a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidSetting(f"{option} {path}: no permission to write there; give another file")
