"""`kvps top`: a job as it is now, on the whole terminal or as text."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from kvps_monitor.live import JobWatch
from kvps_monitor.top import rows
from kvps_monitor.views import JobView

from kvps.errors import InvalidSetting
from kvps.job import readable
from kvps.store import Store
from kvps_cli import connect, options
from kvps_cli.output import print_json
from kvps_cli.tables import plain_console

_WIDE = 180  # columns of a table that goes into a file or to a program


def top(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="Name of the job. Without it you choose one, if there are several.", show_default=False
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the job as it is now as text, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object, and exit.")] = False,
    redis: options.Redis = None,
) -> None:
    """Show live on the terminal what each worker does, and which worker it waits for.

    It shows too which aggregators make the versions. It reads the job twice a second, and stops no worker. The last
    line of the screen names its keys.
    """
    with connect.existing_store(redis) as store:
        if once or as_json:
            name = job or connect.only_job(store)
            with readable(name):
                view = JobWatch(store.job(name)).look()
            if as_json:
                print_json(view.as_json())
            else:
                _print(view)
        else:
            _show(store, job)


def _show(store: Store, name: str | None) -> None:
    with options.extra("top", "kvps top needs Textual and NVML", "textual", "pynvml"):
        from kvps_monitor.top.app import show
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidSetting("kvps top draws on a terminal, and here is none: give --once or --json")
    names = store.jobs() if name is None else [name]
    if name is not None:
        with readable(name):
            store.job(name)  # an unknown job is an error at once
    show(store, names[0] if len(names) == 1 else None)


def _print(view: JobView) -> None:
    console = plain_console()
    width = min(console.width, _WIDE)
    for line in rows.header(view, width):
        console.print(line.plain)
    if view.workers:
        console.print(rows.legend().plain.strip())
        columns, slowest = rows.worker_columns(width, view.workers), rows.slowest_ms(view.workers)
        workers = rows.ordered(view.workers, slowest_first=True)
        cells = [[column.shown(w, slowest).plain for column in columns] for w in workers]
        _print_table([column.head.plain for column in columns], cells)
    elif not view.published_by:
        console.print("no worker has joined")
    titles, shards = rows.shard_table(view.shards, width)
    _print_table([title.plain for title in titles], [[cell.plain for cell in row] for row in shards])


def _print_table(titles: list[str], cells: list[list[str]]) -> None:
    for row in [titles, *cells]:
        print(" ".join(row).rstrip())
