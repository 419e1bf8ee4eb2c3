"""The dashboard for Grafana, and how Compose starts Prometheus and Grafana with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.command_lines import check_parses
from helpers.paths import ROOT
from kvps_cli.look.metrics import PORT
from kvps_monitor.metrics import server
from kvps_monitor.metrics.table import SPECS, TABLE, markdown
from ruamel.yaml import YAML

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/kvps.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]
VARIABLES: dict[str, dict[str, Any]] = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
PAGE = (ROOT / "docs/monitoring.md").read_text()


def _yaml(path: str) -> Any:
    return YAML(typ="safe").load((ROOT / path).read_text())


SERVICES = _yaml("docker/compose.yaml")["services"]


def _queries() -> list[str]:
    """All queries of the dashboard: of its panels and of its variables."""
    of_panels = [target["expr"] for panel in SHOWN for target in panel["targets"]]
    return of_panels + [each["definition"] for each in VARIABLES.values() if each["type"] == "query"]


def _series(query: str) -> set[str]:
    return set(re.findall(r"\bkvps_\w+", query))


def test_each_query_asks_for_metrics_and_labels_that_there_are() -> None:
    series = {name: spec for spec in TABLE for name in spec.series}
    for query in _queries():
        assert _series(query), query
        assert _series(query) <= series.keys(), query
        for name, labels in re.findall(r"\b(kvps_\w+)\{([^}]*)\}", query):
            used = set(re.findall(r"(\w+)=~?\"", labels))
            assert used <= {*series[name].labels, "le"}, query


def test_each_metric_is_on_the_dashboard_but_those_that_explain_others() -> None:
    shown = {name for query in _queries() for name in _series(query)}
    missing = {name for name, spec in SPECS.items() if not spec.series & shown}
    assert missing == {"kvps_reading_seconds", "kvps_log_versions_missed_total", "kvps_recoveries_total"}


def test_a_rate_is_of_a_counter_alone() -> None:
    counted = {name for spec in TABLE if spec.type != "gauge" for name in spec.series}
    for query in _queries():
        rated = set(re.findall(r"\b(?:rate|increase)\((kvps_\w+)", query))
        assert rated <= counted, query
        alone = _series(query) & counted - rated - {
            "kvps_units_done_total",
            "kvps_backup_tasks_total",
            "kvps_lease_takes_total",
        }
        assert not alone, f"{query}: {alone} only grow"


def test_it_is_in_the_form_of_grafana() -> None:
    assert DASHBOARD["schemaVersion"] >= 39
    assert DASHBOARD["id"] is None, "the id is of one Grafana"
    assert [row["title"] for row in PANELS if row["type"] == "row"] == ["Server and jobs", "Workers", "Shards"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert VARIABLES["datasource"]["type"] == "datasource"
    for each in (*SHOWN, *(target for panel in SHOWN for target in panel["targets"])):
        assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    used = {name for query in _queries() for name in re.findall(r"\$(\w+)", query)} - {"__rate_interval"}
    assert used == VARIABLES.keys() - {"datasource"}
    for panel in SHOWN:
        assert panel["type"] in ("timeseries", "stat", "table", "heatmap")
        assert [target["refId"] for target in panel["targets"]] == list("ABC"[: len(panel["targets"])])


# -- compose ----------------------------------------------------------------------------------------------------------


def test_prometheus_scrapes_what_compose_starts() -> None:
    (scraped,) = _yaml("docker/monitor/prometheus.yaml")["scrape_configs"]
    assert scraped["honor_labels"] is True, "else the label job would be Prometheus's own"
    (target,) = scraped["static_configs"][0]["targets"]
    assert target == f"metrics:{PORT}"
    assert scraped.get("metrics_path", "/metrics") == server.PATH
    command = SERVICES["metrics"]["command"]
    check_parses(command)
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert "ports" not in SERVICES["metrics"], "only Prometheus reaches it"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = _yaml("docker/monitor/grafana/datasources/prometheus.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = _yaml("docker/monitor/grafana/dashboards/kvps.yaml")["providers"]
    mounted = dict(volume.split(":")[1::-1] for volume in SERVICES["grafana"]["volumes"])
    folder = ROOT / "docker" / mounted[provider["options"]["path"]]
    assert json.loads((folder / "kvps.json").read_text()) == DASHBOARD
    assert (ROOT / "docker" / mounted["/etc/grafana/provisioning"] / "datasources").is_dir()
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/kvps.json"


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_their_images_are_pinned_and_what_they_mount_is_there(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?", service["image"])
    for volume in service["volumes"]:
        source = volume.partition(":")[0]
        assert not source.startswith(".") or (Path(ROOT / "docker") / source).exists(), source


def test_nobody_logs_in_to_grafana_and_only_this_host_sees_it() -> None:
    grafana = SERVICES["grafana"]
    assert grafana["ports"] == ["127.0.0.1:3000:3000"]
    settings = grafana["environment"]
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true", "admin has a password that all know"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_table_of_the_exporter() -> None:
    assert markdown() in PAGE


def test_the_page_scrapes_the_port_that_the_command_has() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (scraped,) = YAML(typ="safe").load(example)["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == [f"127.0.0.1:{PORT}"]
    assert scraped["honor_labels"] is True
