"""The process that averages and commits: reads contributions, reduces them, steps the optimizer, flips the version."""

from kvps_aggregator.aggregator import Aggregator, serve
from kvps_aggregator.held_shards import AggregatorOptions
from kvps_aggregator.publishing import Publishing
from kvps_aggregator.version_maker import Outcome

__all__ = ["Aggregator", "AggregatorOptions", "Outcome", "Publishing", "serve"]
