"""The compose file, as far as it can be checked without a Docker engine; its server's command runs here."""

from __future__ import annotations

import os
import re
import runpy
import signal
import stat
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
from helpers.compose import COMPOSE, NODES, PASSWORDS, SECRETS, SERVICES, USERS, server_command, started_server
from helpers.kustomize import rendered
from helpers.paths import ROOT, program_on_path
from helpers.waiting import command_lines_with, eventually
from packaging.version import Version

from kvps.protocol.acl import rules

PINNED = runpy.run_path(str(ROOT / "docker" / "pin.py"))["FILES"]
PASSWORD = PASSWORDS["administrator"]
SERVERS = {"valkey", "cluster", *NODES}  # what runs the server's image
WATCHERS = {"prometheus": "65534:65534", "grafana": "472:0"}  # what knows neither Redis nor a password: its user
ROLES = {  # service of kvps: the role that it needs
    "aggregator": "aggregator",
    "standby": "aggregator",
    "worker": "host",
    "gpu-worker": "host",
    "submit": "submitter",
    "metrics": "reader",
}
FIXED = Version("9.0.0")  # Valkey without CVE-2025-49844; 8.1.4 has the fix too


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


def test_each_service_has_the_password_of_its_own_role_alone() -> None:
    """Compose gives a secret that is no file to no service with a read-only root (docker/compose#12031)."""
    assert COMPOSE["secrets"] == {user: {"file": f"./secrets/{user}"} for user in USERS}
    assert set(USERS) == {"administrator", *ROLES.values()}
    for name, each in SERVICES.items():
        if name in ROLES:
            role, given = ROLES[name], each["environment"]
            assert each["secrets"] == [role]
            assert given["KVPS_REDIS_PASSWORD_FILE"] == f"{SECRETS}/{role}"
            assert given["KVPS_REDIS_URL"] == f"redis://{role}@${{KVPS_NODE:-valkey}}:6379"
        elif name in WATCHERS:
            assert "secrets" not in each
        else:
            assert set(each["secrets"]) == ({"administrator"} if name == "cluster" else set(USERS))
    for ignored in (".gitignore", ".dockerignore"):
        assert "docker/secrets" in (ROOT / ignored).read_text().splitlines()


def test_the_users_have_the_rules_that_their_roles_have_today() -> None:
    lines = (ROOT / "docker" / "users.conf").read_text().splitlines()
    assert lines == [" ".join(["user", role, *rules(role, "*")]) for role in USERS[1:]], "make users"
    makefile = (ROOT / "Makefile").read_text()
    (made,) = re.findall(r"^users: .*\n\t\$\(BIN\)/python -c '(.*?)' > docker/users.conf$", makefile, re.M | re.S)
    printed = subprocess.run([sys.executable, "-c", made], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == lines


def test_nobody_has_a_right_of_roots_or_writes_to_its_root() -> None:
    for name, each in SERVICES.items():
        assert (each["read_only"], each["cap_drop"], each["security_opt"]) == (
            True,
            ["ALL"],
            ["no-new-privileges:true"],
        )
        user = "999:999" if name in SERVERS else WATCHERS.get(name)
        assert each.get("user") == user, "that of kvps stands in its images"
        assert not each.keys() & {"privileged", "cap_add", "devices", "pid", "ipc"}
        assert "/tmp" in each["tmpfs"]
        written = [volume for volume in each.get("volumes", []) if not volume.endswith(":ro")]
        assert written == {"valkey": ["data:/data"], "prometheus": ["prometheus:/prometheus"]}.get(
            name, [f"{name}:/data"] if name in NODES else []
        )


def test_the_command_that_makes_the_passwords_is_the_same_everywhere_and_makes_all(tmp_path: Path) -> None:
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/deploy.md", "docker/compose.yaml")]
    made = [re.findall(r"^(?:#   )?(\(umask 077; .*\n.*\))$", text, re.MULTILINE) for text in texts]
    (command,) = made[0]
    assert made == [[command], [command], [command.replace("\n", "\n#   ")]]
    (tmp_path / "docker").mkdir()
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    files = sorted((tmp_path / "docker" / "secrets").iterdir())
    assert [file.name for file in files] == sorted(USERS)
    assert len({file.read_text() for file in files}) == len(USERS)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o444}, "users of containers are others"
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700, "nobody else of this host reaches them"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.DEVNULL).returncode, "they stay"


def test_each_command_of_kvps_has_the_options_of_this_version() -> None:
    ours = {name: each for name, each in SERVICES.items() if name not in SERVERS | WATCHERS.keys()}
    assert ours.keys() == ROLES.keys()
    for each in ours.values():
        check_parses([*each.get("entrypoint", ["kvps"])[1:], *each["command"]])


def test_each_service_that_a_page_runs_gets_options_of_this_version() -> None:
    """A service of kvps begins with its entry point, and what stands behind its name replaces its command."""
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/deploy.md", "docker/compose.yaml"))
    runs = re.findall(r"compose\.yaml (?:--profile \w+ )?run ((?:-\S+ )*)(\w+) (.*)", text)
    assert len(runs) == 6
    for options, service, words in runs:
        (kvps, *begin) = re.findall(r"--entrypoint=(\w+)", options) or SERVICES[service].get("entrypoint", ["kvps"])
        assert kvps == "kvps"
        check_parses([*begin, *words.split()])


def _of_pod() -> list[str]:
    """The command of the server's pod in Kubernetes."""
    pods = (each["spec"].get("template") for each in rendered(ROOT / "deploy" / "kubernetes" / "base"))
    containers = (container for pod in pods if pod for container in pod["spec"]["containers"])
    (command,) = (container["command"] for container in containers if container["name"] == "valkey")
    return list(command)


def _on_socket(folder: Path) -> str:
    """The options of a server with a socket in place of the port."""
    return f"--port 0 --unixsocket {folder / 'socket'}"


@pytest.mark.slow
@pytest.mark.parametrize(("of", "most"), [(server_command, 0), (_of_pod, 3 << 30)], ids=["compose", "kubernetes"])
def test_the_server_wants_the_password_and_keeps_what_it_gets(
    of: Callable[[], list[str]], most: int, tmp_path: Path
) -> None:
    path, passwords = str(tmp_path / "socket"), PASSWORDS | {"redis/password": PASSWORD}
    server = started_server(tmp_path, of(), _on_socket(tmp_path), passwords)
    try:
        assert eventually((tmp_path / "socket").exists)
        with redis.Redis(unix_socket_path=path) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        wanted = {"appendonly": "yes", "maxmemory": str(most), "maxmemory-policy": "noeviction", "dir": str(tmp_path)}
        with redis.Redis(unix_socket_path=path, password=PASSWORD) as client:
            assert {name: client.config_get(name)[name] for name in wanted} == wanted
        assert not [found for password in PASSWORDS.values() for found in command_lines_with(password)]
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)


def _refusal(folder: Path, command: list[str], passwords: dict[str, str]) -> str:
    """Return what a server says that does not start."""
    server = started_server(folder, command, _on_socket(folder), passwords)
    try:
        assert eventually(lambda: (folder / "socket").exists() or server.poll() is not None)
        assert not (folder / "socket").exists()
    finally:
        server.kill()
        said = server.communicate(timeout=120)[1].decode()
    assert server.returncode == 1
    return said


@pytest.mark.parametrize("password", ["", " ", "two words", 'quo"te', "x ~* +@all", "first\nsecond", None])
@pytest.mark.parametrize("user", ["administrator", "submitter"])
def test_without_a_password_that_it_understands_the_server_does_not_start(
    user: str, password: str | None, tmp_path: Path
) -> None:
    given = {name: text for name, text in (PASSWORDS | {user: password}).items() if text is not None}
    assert f"docker/secrets/{user} must hold letters and digits alone\n" in _refusal(tmp_path, server_command(), given)


@pytest.mark.parametrize("password", ["", "two words"])
def test_a_pod_without_a_password_that_it_understands_does_not_start(password: str, tmp_path: Path) -> None:
    assert "requirepass" in _refusal(tmp_path, _of_pod(), {"redis/password": password})


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

    def start(self) -> None:
        """Start the nodes, each on another address than last time."""
        self._network += 1
        for name in NODES:
            (self._folder / name).mkdir(exist_ok=True)
            at = self.address(name)
            options = f"--bind {at} --bind-source-addr {at} --port {self._port} --cluster-node-timeout 2000"
            self._nodes.append(started_server(self._folder / name, server_command(name), options))
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
        *shell, text = server_command("cluster")
        text = text.replace(SECRETS, str(self._folder / "node-1" / "secrets")).replace("6379", str(self._port))
        done = subprocess.run([*shell, text], env=environment, capture_output=True, text=True, timeout=60)
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

    def _client(self, name: str, user: str = "administrator") -> redis.Redis:
        login = {"username": "default" if user == "administrator" else user, "password": PASSWORDS[user]}
        return redis.Redis(self.address(name), self._port, **login, protocol=2)

    def has_users(self, name: str) -> bool:
        """Return whether a node takes the password of each user."""
        return all(self._answers(name, user) for user in USERS)

    def _answers(self, name: str, user: str = "administrator") -> bool:
        try:
            with self._client(name, user) as client:
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
                assert cluster.has_users(name)
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
