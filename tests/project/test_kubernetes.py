"""deploy/kubernetes, as far as it can be checked without a cluster: its schemas, what it promises, kvps's own options.
`test_compose` runs its server's command."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from helpers.command_lines import check_parses
from helpers.kustomize import loaded, rendered
from helpers.paths import ROOT
from kvps_cli.look import dashboard, metrics

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = {"base": FOLDER / "base", "gpu": FOLDER / "overlays" / "gpu"}
SECRET = "/run/secrets/redis/password"
OURS = {"aggregator", "create", "worker"}  # the components that run kvps
SCREENS = {"metrics", "dashboard"}  # components of pods that a user adds
VERSIONS = ("1.31", "1.37")  # podReplacementPolicy and backoffLimitPerIndex are on by default in all of these


@pytest.fixture(params=OVERLAYS, scope="module")
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(OVERLAYS[request.param])


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The component, the pod and its only container, of each object that makes pods."""
    for each in objects:
        if template := each["spec"].get("template"):
            (container,) = template["spec"]["containers"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"], container


def one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The spec of one object."""
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return dict(found["spec"])


def selects(selector: dict[str, Any], component: str) -> bool:
    """Whether a selector means the pods of a component."""
    labels = {"app.kubernetes.io/name": "kvps", "app.kubernetes.io/component": component}
    of_in = {"In": True, "NotIn": False}
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        (labels.get(rule["key"]) in rule["values"]) == of_in[rule["operator"]]
        for rule in selector.get("matchExpressions", [])
    )


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_schema_of_kubernetes(objects: list[dict[str, Any]], version: str) -> None:
    assert len(objects) == 9
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


# -- commands -------------------------------------------------------------------------------------------------------


def test_every_command_has_the_options_of_this_version(objects: list[dict[str, Any]]) -> None:
    seen = set()
    for component, _, container in pods(objects):
        if component in OURS:
            seen.add(component)
            given = {each["name"]: each.get("value", "1") for each in container["env"]}
            words = list(container["args"])
            for name, value in given.items():
                words = [word.replace(f"$({name})", value) for word in words]
            assert not any("$" in word for word in words), "a variable that the container has not"
            check_parses(words)
    assert seen == OURS


def test_the_workers_are_those_of_the_job_that_is_created(objects: list[dict[str, Any]]) -> None:
    create = one(objects, "Job", "create")["template"]["spec"]["containers"][0]["args"]
    workers = one(objects, "Job", "workers")
    args = workers["template"]["spec"]["containers"][0]["args"]
    assert create[create.index("--workers") + 1] == str(workers["completions"])
    assert create[create.index("--job") + 1] == args[args.index("--job") + 1]
    assert args[args.index("--id") + 1] == "w$(INDEX)", "the ids of kvps create's workers"


def test_one_aggregator_stands_by_and_probes_ask_what_it_answers(objects: list[dict[str, Any]]) -> None:
    deployment = one(objects, "Deployment", "aggregator")
    assert (deployment["replicas"], one(objects, "PodDisruptionBudget", "aggregator")["minAvailable"]) == (2, 1)
    (container,) = deployment["template"]["spec"]["containers"]
    (port,) = container["ports"]
    args = container["args"]
    assert args[args.index("--health-port") + 1] == str(port["containerPort"])
    asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert asked == {
        "startup": {"path": "/live", "port": port["name"]},
        "readiness": {"path": "/ready", "port": port["name"]},
        "liveness": {"path": "/live", "port": port["name"]},
    }


@pytest.mark.slow
def test_the_run_of_a_script_is_stopped_by_sigterm_and_resumed() -> None:
    objects = loaded((FOLDER / "script.yaml").read_text())
    for version in VERSIONS:
        kubernetes_validate.validate(objects[0], version, strict=True)
    job = one(objects, "Job", "script")
    ((_, pod, container),) = pods(objects)
    args = container["args"]
    check_parses(args)
    assert "--resume" in args
    assert int(args[args.index("--stop-grace") + 1]) < pod["terminationGracePeriodSeconds"]
    assert job["podReplacementPolicy"] == "Failed"
    codes = {rule["action"]: rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    named = {"containerName": container["name"], "operator": "In"}
    assert codes == {"Ignore": named | {"values": [os.EX_TEMPFAIL]}, "FailJob": named | {"values": [2]}}
    (worker,) = (each for each in pods(rendered(OVERLAYS["base"])) if each[0] == "worker")
    assert (container["env"], container["securityContext"]) == (worker[2]["env"][:2], worker[2]["securityContext"])
    assert pod["securityContext"] == worker[1]["securityContext"]


# -- security -------------------------------------------------------------------------------------------------------


def test_nobody_is_root_and_nothing_can_be_written_but_volumes(objects: list[dict[str, Any]]) -> None:
    for name, pod, container in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"], name
        assert (
            pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == (10001 if name in OURS else 999)
        )
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"], name


def test_the_password_is_a_secret_that_the_user_makes(objects: list[dict[str, Any]]) -> None:
    assert not [each for each in objects if each["kind"] == "Secret"]
    for name, pod, container in pods(objects):
        (volume,) = (each for each in pod["volumes"] if "secret" in each)
        assert volume["secret"] == {"secretName": "kvps-redis", "defaultMode": 0o440}, name
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == volume["name"])
        assert mount == {"name": volume["name"], "mountPath": os.path.dirname(SECRET), "readOnly": True}
        if name in OURS:
            given = {each["name"]: each.get("value") for each in container["env"]}
            assert given["KVPS_REDIS_PASSWORD_FILE"] == SECRET
            assert given["KVPS_REDIS_URL"] == "redis://valkey:6379"


def test_only_kvps_reaches_the_server_and_nobody_reaches_kvps(objects: list[dict[str, Any]]) -> None:
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    for component in (*OURS, *SCREENS, "valkey"):
        (policy,) = (each for each in policies if selects(each["podSelector"], component))
        assert "Ingress" in policy["policyTypes"]
        if component in OURS:
            assert "ingress" not in policy
            continue
        assert "egress" not in policy
        (rule,) = policy["ingress"]
        if component in SCREENS:
            assert [each["port"] for each in rule["ports"]] == [metrics.PORT, dashboard.PORT]
            assert [*rule["from"][0]["podSelector"]] == [], "all pods of the namespace"
            continue
        assert rule["ports"] == [{"protocol": "TCP", "port": 6379}]
        (peer,) = rule["from"]
        assert {each for each in (*OURS, *SCREENS, "valkey") if selects(peer["podSelector"], each)} == OURS | SCREENS
        assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kvps"}, "no other pods"


def test_the_images_are_those_of_the_compose_file_and_of_this_version(objects: list[dict[str, Any]]) -> None:
    compose = loaded((ROOT / "docker" / "compose.yaml").read_text())[0]["services"]
    version = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    for name, _, container in pods(objects):
        image = container["image"].partition("@")[0]
        if name == "valkey":
            assert image == compose["valkey"]["image"].partition("@")[0]
        else:
            assert image in (f"kvps:{version}", f"kvps-cuda:{version}")
