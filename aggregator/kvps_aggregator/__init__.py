"""The process that averages and commits: polls contributions, reduces them, steps the optimizer, flips the version."""

from kvps_aggregator.aggregator import Aggregator, serve

__all__ = ["Aggregator", "serve"]
