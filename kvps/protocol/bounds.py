"""Bounds of a job's bytes, in memory and on their way: the aggregator keeps to them, the simulation computes with them.

How many chunks a reader asks for ahead is in `arrays.layout`, beside the size of a chunk.
"""

from __future__ import annotations

MOST_EARLY_BYTES = 512 << 20
"""What an aggregator fetches before the plan is made, for all shards of a job together."""
LEAST_EARLY_BYTES = 256 << 10
"""A contribution to a shard that has fewer is not worth a request for the inbox."""
VERSIONS_KEPT = 2
"""The present version and the one before, which stay readable however large the model is."""
MOST_DIFFERENCES = 256
"""The lossless differences that are kept beside the versions that a learner publishes."""
