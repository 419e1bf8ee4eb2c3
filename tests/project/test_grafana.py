"""The dashboard for Grafana, and how Compose starts Prometheus and Grafana with it."""

from __future__ import annotations

import json
import re
from typing import Any

from helpers.paths import ROOT
from kvps_monitor.metrics.table import SPECS, TABLE, markdown
from ruamel.yaml import YAML

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/kvps.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]
VARIABLES: dict[str, dict[str, Any]] = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
PAGE = (ROOT / "docs/monitoring.md").read_text()


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


# -- compose ----------------------------------------------------------------------------------------------------------


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_table_of_the_exporter() -> None:
    assert markdown() in PAGE


def test_nobody_logs_in_to_grafana_and_only_this_host_sees_it() -> None:
    grafana = YAML(typ="safe").load((ROOT / "docker/compose.yaml").read_text())["services"]["grafana"]
    assert grafana["ports"] == ["127.0.0.1:3000:3000"]
    settings = grafana["environment"]
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true", "admin has a password that all know"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
