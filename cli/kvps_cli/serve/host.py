"""`kvps host`: one command a host. A node of a cluster and an aggregator near it spread jobs over all links."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvps.connection.credentials import PASSWORD_FILE, read_password
from kvps.connection.slots import Address
from kvps.errors import InvalidSetting, KvpsError, ServerLost
from kvps.machine import launcher, process
from kvps.machine.address import is_loopback
from kvps.machine.child_process import ChildProcess
from kvps.server import cluster_node
from kvps.server.cluster_members import check_cluster
from kvps.server.data_host import DataHost
from kvps_cli import options
from kvps_cli.long_work import LongWork, Stage
from kvps_cli.output import log_options, say, start_log

_POLL_S = 0.2
_START_AGAIN_S = 2.0
_END_S = 10.0


def host(
    join: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Join the cluster of the node at this URL.", show_default="begin a cluster"),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the node listens: the address by which all other hosts reach this one. The port 10,000 above "
            "must be free too.",
            show_default="with --join the address on the way there",
        ),
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar=PASSWORD_FILE,
            help="Read the password of all nodes from this file, the same on all hosts.",
            show_default="the one in --join's URL",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the node's data in this directory: the same command brings it back with its slots.",
            show_default="it keeps nothing",
        ),
    ] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Make this host a part of a cluster: one node of it, and an aggregator near that.

    The first host begins the cluster, and each other host joins it and takes an even share of the slots. Ctrl-C gives
    the slots back to the other hosts; a second one ends the node at once, and what it held is lost.
    """
    quiet = start_log(quiet, verbose)
    password = read_password(password_file) if password_file else None
    address = cluster_node.parse_listen(listen) if listen else None
    seed = None
    if join is not None:
        seed, password = cluster_node.of_url(join, password)
        if not cluster_node.is_in_cluster(data_dir):  # a cluster is not whole while this node is away
            check_cluster(seed, password)
        address = address or cluster_node.address_towards(seed)
    if address is None:
        raise InvalidSetting("the first host needs --listen HOST:PORT, and each other host --join URL of a node")
    if password is None and not is_loopback(address.host):
        raise InvalidSetting(
            f"{address} is open to the network: give all hosts the same password, with --password-file FILE"
        )
    with cluster_node.started(address, password, data_dir) as node, ExitStack() as stack:
        moves = Stage("moving slots", unit="slots")
        member = DataHost(address, password, partial(_note, moves))
        try:
            with LongWork(quiet) as work, work.showing(moves):
                member.come(seed)
            aggregator = _Aggregator(address, password, log_options(quiet, verbose))
            stack.callback(aggregator.end)
            if not quiet:
                _say_how_to_join(address, bool(password))
            _watch(node, aggregator, address)
        except KeyboardInterrupt:
            try:
                with LongWork(quiet) as work, work.showing(moves):
                    _leave(member, stack, data_dir)
            except KvpsError as error:
                raise ServerLost(f"the node at {address} ends, and could not give its slots back: {error}") from None
            raise
        except KvpsError:
            if node.poll() is None:
                with suppress(KvpsError):  # the first error says more
                    _leave(member, stack, data_dir)
            raise


def _note(stage: Stage, moved: int, of: int) -> None:
    """Note how many of how many slots have moved."""
    if not moved:
        stage.began = time.monotonic()  # the work before this was another
    stage.done, stage.total = moved, of


def _watch(node: ChildProcess, aggregator: _Aggregator, address: Address) -> None:
    """Keep the aggregator running for as long as the node runs. Raises ServerLost when the node has ended."""
    while node.poll() is None:
        aggregator.keep_running()
        with suppress(subprocess.TimeoutExpired):
            node.wait(_POLL_S)
    raise ServerLost(
        f"the node at {address} has ended ({node.returncode}), and what it held is gone unless it has --data-dir"
    )


def _leave(member: DataHost, stack: ExitStack, data_dir: Path | None) -> None:
    """Give the slots back, end the aggregator, and leave the cluster. The last host keeps its slots and just ends."""
    # Until its slots have moved, the aggregator serves them.
    if member.is_last() or not member.leave(stack.close, resets=data_dir is not None):
        say("the last host ends: " + (f"its jobs are kept in {data_dir}" if data_dir else "its jobs end with it"))


def _say_how_to_join(address: Address, protected: bool) -> None:
    url = cluster_node.url_of(address, None)
    say(f"on each other host: kvps host --join {url}{' --password-file FILE' if protected else ''}")
    say(f"workers: {f'{PASSWORD_FILE}=FILE ' if protected else ''}KVPS_REDIS_URL={url} kvps worker")


class _Aggregator:
    """The process of an aggregator near a node. The URL with the password is in its environment."""

    def __init__(self, address: Address, password: str | None, logging: Sequence[str]) -> None:
        # -P keeps a redis.py or random.py in the user's directory from being imported instead of the real module.
        command = [sys.executable, "-P", "-m", "kvps", "aggregator", "start", "--near", str(address), *logging]
        self._command = process.ending_with_this(command)
        own = {"KVPS_REDIS_URL": cluster_node.url_of(address, password)}
        self._environment = os.environ | own | {launcher.VARIABLE: launcher.this_process("kvps host")}
        self._process = self._start()

    def _start(self) -> ChildProcess:
        # In a session of its own: Ctrl-C in the terminal reaches it from here, after the slots have moved.
        return ChildProcess(self._command, env=self._environment, stdin=subprocess.DEVNULL, start_new_session=True)

    def keep_running(self) -> None:
        """Start it again if it has ended."""
        if self._process.poll() is None:
            return
        say(f"the aggregator has ended ({self._process.returncode}): it is started again")
        time.sleep(_START_AGAIN_S)
        self._process = self._start()

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
