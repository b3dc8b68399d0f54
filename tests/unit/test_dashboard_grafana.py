"""The Grafana board and the alert rules name only metrics that the gateway has, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from weighbridge.gateway.stats import Stats

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "grafana"
NAME = re.compile(r"weighbridge_[a-z_]+")


def known() -> set[str]:
    """Names as Prometheus sees them: families of the data plane with their suffixes, and the admin's gauges."""
    names = set()
    for family in Stats().families:
        if family.bounds is None:
            names.add(f"{family.name}_total")
        else:
            names |= {f"{family.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
    gateway = ROOT / "weighbridge" / "gateway"
    source = (gateway / "admin.py").read_text() + (gateway / "kv" / "metrics.py").read_text()
    names |= set(re.findall(r'gauge\("(weighbridge_[a-z_]+)"', source))
    for prefix in re.findall(r'gauge\(f"(weighbridge_[a-z_]+)\{name\}"', source):
        names |= {prefix + name for name in re.findall(r'^\s+\("([a-z_]+)", "', source, re.M)}
    return names


def board() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "weighbridge-fleet.json").read_text()))


def rules() -> list[dict[str, Any]]:
    return list(yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"])


def test_every_metric_of_the_board_exists() -> None:
    used = {name for p in board()["panels"] for t in p["targets"] for name in NAME.findall(t["expr"])}
    assert len(used) > 10
    assert used <= known()


def test_every_metric_of_the_rules_exists_and_every_rule_says_what_to_do() -> None:
    for rule in rules():
        assert set(NAME.findall(rule["expr"])) <= known()
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["action"].startswith("weighbridge ")


OUTCOMES = ("ok", "failed", "cancelled", "client_error", "rejected_no_instance", "rejected_queue_full", "refused_400")
OUTCOMES += ("dispatched",)  # of waiting in the queue


def test_outcomes_are_spelled_as_the_gateway_spells_them() -> None:
    """A pattern in PromQL must match the whole value."""
    texts = [rule["expr"] for rule in rules()] + [t["expr"] for p in board()["panels"] for t in p["targets"]]
    patterns = [part for text in texts for part in re.findall(r'outcome(?:=~|=)"([^"]+)"', text)]
    assert patterns
    for alternative in (each for pattern in patterns for each in pattern.split("|")):
        assert any(re.fullmatch(alternative, outcome) for outcome in OUTCOMES), alternative


def test_panels_do_not_overlap_and_each_explains_itself() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        assert panel["description"]
        taken |= cells


def test_labels_that_are_grouped_by_exist() -> None:
    labels = {label for family in Stats().families for label in family.labels} | {"le", "instance"}
    text = json.dumps(board()) + (FOLDER / "alerts.yaml").read_text()
    for group in re.findall(r"by \(([a-z_, ]+)\)", text):
        assert {name.strip() for name in group.split(",")} <= labels
