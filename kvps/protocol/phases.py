"""The phases of a round, as traces name them, each in the order in which it comes."""

from __future__ import annotations

OTHER, WAIT, FETCH, COMPUTE, PUSH = WORKER_PHASES = ("other", "wait", "fetch", "compute", "push")
"""Of a worker's iteration: the user's own code between a push and the next pull; waiting for the bound to admit the
round; receiving weights; from the pull's return to the push's call; and until the push is acknowledged."""
SHARD_PHASES = ("fetch", "reduce", "step", "store", "commit")
"""Of a shard's version: waiting for contributions; reducing them; the optimizer's step; digests, and sending the new
version; and `ready`."""
