"""Hosts on this machine: namespaces of the kernel, joined by links of a given rate that can go down and come up again.

Each host has its own network, host name, process ids and /dev/shm; all hosts share the files. Nothing here has a name
that would stay: a host ends with its first process, which ends when this process does, in whatever way, and the kernel
then removes the host's processes, its interface and the link. Who is not root makes the hosts in a user namespace.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from kvps.errors import KvpsError

_PROGRAMS = ("ip", "tc", "unshare", "nsenter")
_NETWORK = "10.78.0"
_BURST_S = (
    1e-3  # of the link's rate; and never less than LEAST_BURST, which holds several of the kernel's large packets
)
LEAST_BURST = 512 << 10
# A host's first process: it ends with its standard input.
_BEGIN = "hostname {0} && mount -t tmpfs kvps-{0} /dev/shm && ip link set lo up && echo up && exec cat"
_USER = ("--user", "--preserve-credentials")


class NoHosts(KvpsError):
    """Hosts cannot be made here; the text is the reason."""


class Host:
    """One host. `address` is its IPv4 address in the network, on its `interface`; `number` counts from 0."""

    interface = "eth0"

    def __init__(self, network: Network, number: int) -> None:
        self.number, self.name, self.address = number, f"kvps{number}", f"{_NETWORK}.{number + 1}"
        self._switch = network.switch
        command = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._first = _begun([*self._switch.entering(), *command, "sh", "-c", _BEGIN.format(self.name)])
        self._port = f"p{number}"

    def connect(self) -> None:
        """Make the link to the switch."""
        self._switch.ip(f"link add {self._port} type veth peer name {self.interface} netns {self._first.pid}")
        self._switch.ip(f"link set {self._port} master {_Switch.BRIDGE} up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", self.interface)
        self.run("ip", "link", "set", self.interface, "up")
        self.run("ip", "route", "add", "default", "via", _Switch.ADDRESS)

    def entering(self) -> list[str]:
        """Return the command that runs on this host what is put behind it."""
        namespaces = ["--net", "--uts", "--ipc", "--mount", f"--pid=/proc/{self._first.pid}/ns/pid_for_children"]
        return ["nsenter", *self._switch.user, f"--target={self._first.pid}", *namespaces, f"--wd={os.getcwd()}", "--"]

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host; `options` are those of Popen. It ends with the host. See `signal`."""
        return subprocess.Popen([*self.entering(), *command], **options)

    def run(self, *command: str) -> str:
        """Run a command on this host to its end; return what it prints. Raises NoHosts if it fails."""
        return _done([*self.entering(), *command])

    def signal(self, process: subprocess.Popen[Any], number: int) -> None:
        """Send a signal to a process that `start` started: to it, and not to nsenter, which waits for it."""
        with suppress(OSError):  # it has ended
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), number)

    def kill(self) -> None:
        """Send SIGKILL to all processes of this host but its first."""
        self.run("sh", "-c", "kill -KILL -1")

    # -- the link --------------------------------------------------------------------------------------------------

    def hold_rate(self, bits_per_s: float) -> None:
        """Let no more than this through the link, in each direction."""
        burst = max(LEAST_BURST, int(bits_per_s * _BURST_S / 8))
        held = f"root tbf rate {int(bits_per_s)}bit burst {burst} latency 100ms"
        self.run("tc", "qdisc", "replace", "dev", self.interface, *held.split())
        self._switch.run("tc", "qdisc", "replace", "dev", self._port, *held.split())

    def link_down(self) -> None:
        """Unplug the cable: what is sent is lost, and neither side is told."""
        self._switch.ip(f"link set {self._port} down")

    def link_up(self) -> None:
        """Plug it in again."""
        self._switch.ip(f"link set {self._port} up")

    def counted(self) -> tuple[int, int]:
        """Return how many bytes this host has sent and received so far, as the other end of its link counts them."""
        stats = json.loads(self._switch.run("ip", "-json", "-statistics", "link", "show", self._port))[0]["stats64"]
        return stats["rx"]["bytes"], stats["tx"]["bytes"]

    def close(self) -> None:
        _end(self._first)


class Network:
    """Hosts on one switch. Raises NoHosts, with the reason, where they may not be made."""

    def __init__(self, hosts: int, bits_per_s: float = 0) -> None:
        """Make `hosts` hosts; hold their links to `bits_per_s` if it is not 0."""
        with ExitStack() as stack:
            self.switch = stack.enter_context(closing(_Switch()))
            self.switch.connect()
            self.hosts = [stack.enter_context(closing(Host(self, number))) for number in range(hosts)]
            for host in self.hosts:
                host.connect()
                if bits_per_s:
                    host.hold_rate(bits_per_s)
            self._stack = stack.pop_all()

    def __enter__(self) -> Sequence[Host]:
        return self.hosts

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Switch:
    """A network namespace with the bridge that all links end at."""

    BRIDGE = "switch"
    ADDRESS = f"{_NETWORK}.254"

    def __init__(self) -> None:
        if missing := [name for name in _PROGRAMS if not shutil.which(name, path=_path())]:
            raise NoHosts(f"hosts need Linux and these programs, which are not there: {', '.join(missing)}")
        root = os.geteuid() == 0
        self.user = () if root else _USER
        self._first = _begun(
            ["unshare", *([] if root else ["--user", "--map-root-user"]), "--net", "sh", "-c", "echo up && exec cat"]
        )

    def connect(self) -> None:
        self.ip(f"link add {self.BRIDGE} type bridge")
        self.ip(f"addr add {self.ADDRESS}/24 dev {self.BRIDGE}")
        self.ip(f"link set {self.BRIDGE} up")

    def entering(self) -> list[str]:
        return ["nsenter", *self.user, f"--target={self._first.pid}", "--net", "--"]

    def run(self, *command: str) -> str:
        return _done([*self.entering(), *command])

    def ip(self, command: str) -> None:
        self.run("ip", *command.split())

    def close(self) -> None:
        _end(self._first)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _begun(command: list[str]) -> subprocess.Popen[str]:
    """Start the first process of a namespace, and wait until it is ready."""
    pipe = subprocess.PIPE
    first = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"PATH": _path()}
    )
    assert first.stdout
    if first.stdout.readline() != "up\n":
        _, message = first.communicate()
        raise NoHosts(f"hosts may not be made here: {' '.join(message.split()) or 'a namespace ended at once'}")
    return first


def _end(first: subprocess.Popen[str]) -> None:
    first.communicate()  # the end of its standard input ends it, and with it all processes of a host


def _done(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": _path()})
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise NoHosts(f"hosts cannot be made or used here: {' '.join(command[command.index('--') + 1 :])}: {message}")
    return done.stdout
