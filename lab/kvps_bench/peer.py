"""Other systems that do the same round, each in the Python of its own environment: see `peers/lockstep.py`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvps.errors import InvalidSetting
from kvps_bench.crew import ONE_THREAD
from kvps_bench.result import NOT_INSTALLED
from kvps_bench.turns import CaseFailed

_SCRIPTS = Path(__file__).parent / "peers"
_TRACKER_S = 2.0
_PATIENCE_S = 120.0  # some take long to start


@dataclass(frozen=True)
class Kind:
    """A kind of peer: its environment in the folder of environments, and the script that runs it."""

    name: str
    environment: str
    script: str
    transport: str

    def python(self, folder: Path | None) -> Path | None:
        """Return the Python that has the peer installed, or None."""
        python = folder / self.environment / "bin" / "python" if folder else None
        return python if python and python.exists() else None


GLOO = Kind("gloo all_reduce", "torch", "gloo.py", "tcp")
RPC_TCP = Kind("torch RPC", "torch", "torch_rpc.py", "tcp")
RPC_SHM = Kind("torch RPC", "torch", "torch_rpc.py", "shm")
RAY = Kind("Ray actor", "ray", "ray_actor.py", "shm")
MXNET = Kind("MXNet dist_sync", "mxnet", "mxnet_sync.py", "tcp")
TENSORFLOW = Kind("TensorFlow ParameterServerStrategy", "tf", "tf_server.py", "tcp")
KINDS = (GLOO, RPC_TCP, RPC_SHM, RAY, MXNET, TENSORFLOW)


def checked(folder: Path | None) -> Path | None:
    """Return the folder of environments as an absolute path. Raises InvalidSetting if it is not a folder."""
    if folder and not folder.is_dir():
        raise InvalidSetting(f"--peers {folder} is no folder: name one with the environments of other systems")
    return folder.absolute() if folder else None


class Peer:
    """A running peer, asked for rounds turn by turn. After a failure `why` is the reason.

    Between its turns all its processes are stopped: some spin while they wait, and would take processors from others.
    """

    def __init__(self, kind: Kind, folder: Path | None, workers: int, nbytes: int, tensors: int) -> None:
        self.kind = kind
        self.why = ""
        self._process: subprocess.Popen[str] | None = None
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- lives as long as the process
        python = kind.python(folder)
        if python is None:
            self.why = NOT_INSTALLED
            return
        asked = {"workers": workers, "nbytes": nbytes, "tensors": tensors, "transport": kind.transport}
        self._process = subprocess.Popen(
            [str(python), str(_SCRIPTS / kind.script), json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | ONE_THREAD,
            start_new_session=True,  # the peer starts processes, which must end with it
        )
        with suppress(CaseFailed):
            self._answer("ready")
            self._signal(signal.SIGSTOP)

    def rounds(self, number: int) -> Sequence[float]:
        """Return the seconds of each of `number` rounds. Raises CaseFailed if the peer does not answer."""
        if not self._process or not self._process.stdin:
            raise CaseFailed(self.why)
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()
        took = self._answer("seconds")
        self._signal(signal.SIGSTOP)
        return [float(second) for second in took]

    def finish(self) -> None:
        """Have the peer check its weights, then end it; `why` says if they are wrong."""
        if self._process and self._process.stdin:
            self._signal(signal.SIGCONT)
            self._process.stdin.close()
            with suppress(CaseFailed):
                if self._answer("right") is not True:
                    self.why = "failed: its weights are not what they must be"
        self.close()

    def _answer(self, name: str) -> Any:
        assert self._process
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.close(f"failed: {self._last_words() if ready else f'no answer in {_PATIENCE_S:g} s'}")
            raise CaseFailed(self.why)
        return json.loads(line)[name]

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return lines[-1][:200] if lines else "it ended without a word"

    def close(self, why: str = "") -> None:
        """End the peer and all processes that it has started."""
        self.why = self.why or why
        process, self._process = self._process, None
        if process is None:
            return
        told = process.stdin is None or process.stdin.closed
        with suppress(subprocess.TimeoutExpired):
            process.wait(10 if told and not why else 0)
        end_session(process.pid)
        process.wait()
        for file in (process.stdin, process.stdout, self._said):
            if file:
                with suppress(BrokenPipeError):  # data not written yet to a dead process
                    file.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process:
            _signal_session(self._process.pid, number)


def end_session(session: int) -> None:
    """Kill a session's processes; last Python's resource tracker, which deletes the semaphores that the dead left."""
    for pid in _session(session):
        with suppress(OSError):
            if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    _signal_session(session, signal.SIGCONT)
    for pid in _session(session):
        with suppress(OSError):  # the process has ended
            ended = os.pidfd_open(pid)
            try:
                select.select([ended], [], [], _TRACKER_S)
            finally:
                os.close(ended)
    _signal_session(session, signal.SIGKILL)


def _signal_session(session: int, number: signal.Signals) -> None:
    """Send a signal to all processes of a session: those of one peer, and no others."""
    for pid in _session(session):
        with suppress(OSError):
            os.kill(pid, number)


def _session(session: int) -> Iterator[int]:
    """Yield the ids of a session's processes."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                yield int(entry.name)


@contextmanager
def opened(folder: Path | None, workers: int, nbytes: int, tensors: int) -> Iterator[list[Peer]]:
    """Yield a peer of each kind; `why` says so if it is not installed. The peers end with the block."""
    peers: list[Peer] = []
    try:
        for kind in KINDS:
            peers.append(Peer(kind, folder, workers, nbytes, tensors))
        yield peers
    finally:
        for peer in peers:
            peer.close()
