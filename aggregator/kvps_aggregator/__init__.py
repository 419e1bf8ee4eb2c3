"""The process that averages and commits: polls contributions, reduces them, steps the optimizer, flips the version."""

from kvps_aggregator.loop import Aggregator, serve

__all__ = ["Aggregator", "serve"]
