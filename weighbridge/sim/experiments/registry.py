"""Experiments by name. Adding one is a file and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from weighbridge.core.errors import ConfigError
from weighbridge.sim.experiments.base import Experiment

MODULES: Mapping[str, str] = {
    "two-backends": "two_backends",
    "calibrate-then-route": "calibrate_then_route",
    "width": "width",
    "heterogeneity": "heterogeneity",
    "scarcity": "scarcity",
    "provisioning": "provisioning",
    "stability": "stability",
    "mixing": "mixing",
    "scenario-ab": "scenario_ab",
    "tiers": "tiers",
    "prefix": "prefix",
    "transfer": "transfer",
}


def experiment(name: str) -> Experiment:
    """The experiment of that name. Raises `ConfigError` that lists the known ones."""
    if name not in MODULES:
        raise ConfigError(f"no experiment '{name}'; there are {', '.join(MODULES)}")
    module = importlib.import_module(f"weighbridge.sim.experiments.{MODULES[name]}")
    found: Experiment = module.EXPERIMENT
    return found
