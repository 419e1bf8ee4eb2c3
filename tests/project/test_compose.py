"""The compose file, as far as it can be checked without a Docker engine; its server's command runs here."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.clusters import node_ports
from helpers.command_lines import check_parses
from helpers.kustomize import rendered
from helpers.paths import ROOT, program_on_path
from helpers.waiting import command_lines_with, eventually
from packaging.version import Version
from ruamel.yaml import YAML

from kvps.machine.paths import server_program

COMPOSE = YAML(typ="safe").load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SECRET = "/run/secrets/redis_password"
PINNED = runpy.run_path(str(ROOT / "docker" / "pin.py"))["FILES"]
PASSWORD = "0123456789abcdef" * 4
NODES = [f"node-{number}" for number in range(1, 7)]
SERVERS = {"valkey", "cluster", *NODES}  # what runs the server's image
WATCHERS = {"prometheus", "grafana"}  # what knows neither Redis nor its password
FIXED = Version("9.0.0")  # Valkey without CVE-2025-49844; 8.1.4 has the fix too


def test_valkey_keeps_everything_and_whoever_dies_comes_back() -> None:
    assert {"--appendonly yes", "--maxmemory-policy noeviction"} <= set(re.findall(r"--\S+ \S+", _start()))
    assert SERVICES["valkey"]["volumes"] == ["data:/data"]
    waiting = {name for name, each in SERVICES.items() if each.get("depends_on")}
    assert waiting == SERVICES.keys() - {"valkey", *NODES}
    assert {name for name, each in SERVICES.items() if each["restart"] != "unless-stopped"} == {"submit", "cluster"}
    profiles = {name: each["profiles"] for name, each in SERVICES.items() if "profiles" in each}
    in_cluster = {name: ["cluster"] for name in (*NODES, "cluster")}
    monitor = {name: ["monitor"] for name in (*WATCHERS, "metrics")}
    assert profiles == {"gpu-worker": ["gpu"], "submit": ["submit"]} | in_cluster | monitor


def test_the_server_is_past_cve_2025_49844() -> None:
    assert {each["image"] for name, each in SERVICES.items() if name in SERVERS} == {SERVICES["valkey"]["image"]}
    name, _, version = SERVICES["valkey"]["image"].partition("@")[0].partition(":")
    assert name == "valkey/valkey"
    assert Version(version) >= FIXED
    assert len(Version(version).release) == 3, "a patch release, not the newest of a row"


def test_no_port_is_open_to_other_machines_unless_somebody_asks() -> None:
    for name, each in SERVICES.items():
        assert each.get("network_mode") != "host", name
        for port in each.get("ports", []):
            assert re.match(r"127\.0\.0\.1:|\$\{\w+:-127\.0\.0\.1\}:", port), f"{name}: {port}"


def test_a_process_of_kvps_has_the_time_to_leave() -> None:
    ours = [each for each in SERVICES.values() if each["image"] in ("kvps", "kvps-cuda")]
    assert {each["stop_grace_period"] for each in ours} == {"30s"}


def test_the_password_is_a_secret_that_only_the_user_of_each_service_reads() -> None:
    assert COMPOSE["secrets"] == {"redis_password": {"environment": "KVPS_PASSWORD"}}
    for name, each in SERVICES.items():
        if name in WATCHERS:
            assert "secrets" not in each
            continue
        (secret,) = each["secrets"]
        assert (secret["source"], secret["mode"]) == ("redis_password", 0o400), name
        assert secret.get("uid", "0") == ("0" if name in SERVERS else "10001"), name
        assert "KVPS_PASSWORD" not in json.dumps(each), f"{name}: docker inspect shows it to others"
        if name not in SERVERS:
            assert each["environment"]["KVPS_REDIS_PASSWORD_FILE"] == SECRET
            assert "@" not in each["environment"]["KVPS_REDIS_URL"]
    for ignored in (".gitignore", ".dockerignore"):
        assert "docker/.env" in (ROOT / ignored).read_text().splitlines()


def test_each_command_of_kvps_has_the_options_of_this_version() -> None:
    ours = {name: each for name, each in SERVICES.items() if name not in SERVERS | WATCHERS}
    assert ours.keys() == {"aggregator", "standby", "worker", "gpu-worker", "submit", "metrics"}
    for each in ours.values():
        check_parses([*each.get("entrypoint", ["kvps"])[1:], *each["command"]])


def _start(service: str = "valkey") -> str:
    """The shell's text that a service runs."""
    shell, option, text = SERVICES[service]["command"]
    assert (shell, option) == ("sh", "-c")
    return str(text).replace("$$", "$")


def _of_pod() -> str:
    """The shell's text that the server's pod runs in Kubernetes."""
    pods = (each["spec"].get("template") for each in rendered(ROOT / "deploy" / "kubernetes" / "base"))
    containers = (container for pod in pods if pod for container in pod["spec"]["containers"])
    (text,) = (container["command"][2] for container in containers if container["name"] == "valkey")
    return str(text).replace("/run/secrets/redis/password", SECRET)


def _started(folder: Path, text: str, options: str, password: str = PASSWORD) -> subprocess.Popen[bytes]:
    """Start a server as its image does, in a folder, which has its data, with these options too."""
    (folder / "docker-entrypoint.sh").write_text('#!/bin/sh\nexec "$@"\n')
    (folder / "valkey-server").write_text(f'#!/bin/sh\nexec {shlex.quote(server_program())} "$@"\n')
    for program in ("docker-entrypoint.sh", "valkey-server"):
        (folder / program).chmod(0o700)
    (folder / "password").write_text(f"{password}\n")  # as `openssl ... > password` writes it
    text = text.replace(SECRET, str(folder / "password")).replace("--dir /data", f"--dir {folder}")
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = ["sh", "-c", text.replace(" <<END", f" {options} <<END")]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE)


def _on_socket(folder: Path) -> str:
    """The options of a server with a socket in place of the port."""
    return f"--port 0 --unixsocket {folder / 'socket'}"


@pytest.mark.slow
@pytest.mark.parametrize(("of", "most"), [(_start, 0), (_of_pod, 3 << 30)], ids=["compose", "kubernetes"])
def test_the_server_wants_the_password_and_keeps_what_it_gets(of: Callable[[], str], most: int, tmp_path: Path) -> None:
    path, server = str(tmp_path / "socket"), _started(tmp_path, of(), _on_socket(tmp_path))
    try:
        assert eventually((tmp_path / "socket").exists)
        with redis.Redis(unix_socket_path=path) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        wanted = {"appendonly": "yes", "maxmemory": str(most), "maxmemory-policy": "noeviction", "dir": str(tmp_path)}
        with redis.Redis(unix_socket_path=path, password=PASSWORD) as client:
            assert {name: client.config_get(name)[name] for name in wanted} == wanted
        assert not command_lines_with(PASSWORD)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)


@pytest.mark.parametrize("password", ["", "two words"])
def test_without_a_password_that_it_understands_the_server_does_not_start(password: str, tmp_path: Path) -> None:
    server = _started(tmp_path, _start(), _on_socket(tmp_path), password)
    server.communicate(timeout=120)
    assert server.returncode
    assert not (tmp_path / "socket").exists()


# -- the cluster ------------------------------------------------------------------------------------------------------


class Cluster:
    """The nodes of the compose file on addresses of the loopback, and the service that makes them a cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._network = folder, 0
        (self._port,) = node_ports(1)
        self._nodes: list[subprocess.Popen[bytes]] = []
        client = program_on_path("valkey-cli", "redis-cli")
        programs = {
            "getent": 'echo "$NETWORK.${2#node-} $2"',
            "valkey-cli": f"""export REDISCLI_AUTH="$VALKEYCLI_AUTH"
            case $1 in -h) node=$2; shift 2; set -- -h "$NETWORK.${{node#node-}}" -p {self._port} "$@" ;; esac
            exec {client} "$@" """,
        }
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o700)
        (folder / "password").write_text(PASSWORD)

    def start(self) -> None:
        """Start the nodes, each on another address than last time."""
        self._network += 1
        for name in NODES:
            (self._folder / name).mkdir(exist_ok=True)
            at = self.address(name)
            options = f"--bind {at} --bind-source-addr {at} --port {self._port} --cluster-node-timeout 2000"
            self._nodes.append(_started(self._folder / name, _start(name), options))
        assert eventually(lambda: all(self._answers(name) for name in NODES))

    def stop(self) -> None:
        for node in self._nodes:
            node.send_signal(signal.SIGTERM)
        for node in self._nodes:
            node.communicate(timeout=120)
        self._nodes.clear()

    def address(self, name: str) -> str:
        return f"127.77.{self._network}.{name.removeprefix('node-')}"

    def make(self) -> None:
        """Run the service that makes the cluster."""
        environment = {
            "PATH": f"{self._folder}{os.pathsep}{os.environ['PATH']}",
            "NETWORK": f"127.77.{self._network}",
        }
        text = _start("cluster").replace(SECRET, str(self._folder / "password")).replace("6379", str(self._port))
        done = subprocess.run(["sh", "-c", text], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr

    def nodes(self, name: str) -> dict[str, Any]:
        """Return what a node says of all: address -> flags, whether it is reached, and more."""
        with self._client(name) as client:
            found = client.execute_command("CLUSTER NODES")
        return {address.partition(":")[0]: node for address, node in found.items()}

    def is_whole(self, name: str) -> bool:
        """Return whether a node reaches all nodes at their present addresses, and half of them are masters."""
        found = self.nodes(name)
        roles = sorted(node["flags"].removeprefix("myself,") for node in found.values())
        reached = {address for address, node in found.items() if node["connected"]}
        return reached == set(map(self.address, NODES)) and roles == ["master"] * 3 + ["slave"] * 3

    def _client(self, name: str) -> redis.Redis:
        return redis.Redis(self.address(name), self._port, password=PASSWORD, protocol=2)

    def _answers(self, name: str) -> bool:
        try:
            with self._client(name) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


@pytest.mark.slow
def test_the_profile_makes_a_cluster_that_outlives_new_addresses(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        for _ in range(2):
            cluster.start()
            cluster.make()
            for name in NODES:
                assert eventually(partial(cluster.is_whole, name)), cluster.nodes(name)
            cluster.stop()
    finally:
        cluster.stop()


# -- make images ------------------------------------------------------------------------------------------------------


def _pinned(folder: Path, docker: str) -> subprocess.CompletedProcess[str]:
    """Pin copies of the files, with a program in place of docker that answers as `docker` says."""
    for name in (*PINNED, "docker/pin.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((ROOT / name).read_text())
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "docker").write_text(f"#!/bin/sh\n{docker}\n")
    (programs / "docker").chmod(0o700)
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run([sys.executable, folder / "docker/pin.py"], env=environment, capture_output=True, text=True)


def test_make_images_pins_each_image_of_a_registry_by_its_digest(tmp_path: Path) -> None:
    for digit in "ab":  # the second time there is a digest already
        done = _pinned(tmp_path, f"""echo '{{"digest": "sha256:{digit * 64}"}}'""")
        assert (done.returncode, done.stderr) == (0, "")
        text = "".join((tmp_path / name).read_text() for name in PINNED)
        named = re.findall(r"^(?:FROM| +image:) (\S+)", text, re.MULTILINE)
        ours = {"kvps", "kvps-cuda"}
        assert ours < set(named)
        assert all(each.endswith(f"@sha256:{digit * 64}") for each in named if each not in ours)


def test_make_images_changes_nothing_if_a_digest_is_missing(tmp_path: Path) -> None:
    done = _pinned(tmp_path, "echo 'ERROR: no such image' >&2; exit 1")
    assert (done.returncode, done.stderr) == (1, "nothing is pinned: ERROR: no such image\n")
    for name in PINNED:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
