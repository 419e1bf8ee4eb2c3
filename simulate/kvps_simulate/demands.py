"""Who sends which bytes, and what each step takes of which resource: the protocol of docs/protocol.md in numbers.

All data nodes are alike, and so are all aggregators; each stands for the one that has the most shards. The control keys
lie on one of the data nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from kvps.arrays.formats import format_of
from kvps.arrays.layout import CHUNK_BYTES, CHUNKS_AHEAD, DTYPE
from kvps.protocol.bounds import LEAST_EARLY_BYTES, MOST_EARLY_BYTES, VERSIONS_KEPT
from kvps_simulate.fluid import Activity
from kvps_simulate.settings import SLOTS, Constants, Setting

REDIS, NODE_IN, NODE_OUT, CORES = "Redis core", "node link in", "node link out", "cores of the node's host"
WORKER, WORKER_IN, WORKER_OUT = "worker core", "worker link in", "worker link out"
# A thread of the aggregator receives while another sums; but Python runs one at a time, and they take what one core is.
AGGREGATOR, AGGREGATOR_IN, AGGREGATOR_OUT = "aggregator core", "aggregator link in", "aggregator link out"
ROUND_TRIPS, SERIAL = "round trips of pulls", "aggregators wait for one node at a time"
_DIGEST_BYTES = 17  # of a shard's part of a contribution, with its comma
_CONTRIBUTION_BYTES = 110  # of its text without digests, in inbox, plan and log
_REQUEST_BYTES = 700  # of a call of push or of a turn, with its reply
_VERSIONS = VERSIONS_KEPT + 1  # and the one that is being stored


class Demands:
    """What each step of a job costs on its hosts."""

    def __init__(self, setting: Setting, constants: Constants) -> None:
        self.setting = setting
        self._c = constants
        s = setting
        self.items = s.size / DTYPE.itemsize
        self.weight_bytes = s.size
        self.gradient_bytes = self._encoded(s.gradient_format)
        self.pulled_bytes = self._encoded(s.weight_format)
        slots = SLOTS[s.optimizer]
        self.staged_bytes = s.size * (1 + slots) + (self.pulled_bytes if s.weight_format != "fp32" else 0)
        self._staged_arrays = 1 + slots + (s.weight_format != "fp32")
        self.chunks = s.shards * max(1, math.ceil(s.size / s.shards / CHUNK_BYTES))
        self.node_part = math.ceil(s.shards / s.nodes) / s.shards
        self.aggregator_part = math.ceil(s.shards / s.aggregators) / s.shards
        self.link = s.bandwidth / 8

    def _encoded(self, name: str) -> float:
        chunk = min(self.items, CHUNK_BYTES // DTYPE.itemsize)
        return format_of(name).nbytes(round(chunk)) * self.items / round(chunk)

    # -- where bytes pass a link ---------------------------------------------------------------------------------

    @property
    def local(self) -> bool:
        return self.setting.topology == "local"

    @cached_property
    def _remote(self) -> tuple[float, float]:
        """Which part of a worker's bytes passes its link, and which part of a node's bytes for workers passes its."""
        if self.local:
            return 0.0, 0.0
        if self.setting.topology == "beside":
            nodes, workers = self.setting.nodes, self.setting.workers
            return 1 - 1 / nodes, 1 - 1 / workers
        return 1.0, 1.0

    @property
    def _aggregator_is_remote(self) -> bool:
        if self.setting.topology == "beside":
            return self.setting.aggregators != self.setting.nodes
        return self.setting.topology == "apart"

    @property
    def _node_share(self) -> float:
        """The part of the job's bytes that the fullest link of a node carries."""
        return 1.0 if self.setting.topology == "one-host" else self.node_part

    # -- workers -------------------------------------------------------------------------------------------------

    def _worker(self, kind: str, out: bool, nbytes: float, redis_s: float, worker_s: float) -> Activity:
        of_worker, of_node = self._remote
        seconds = nbytes / self.link
        shared = {REDIS: redis_s * self.node_part, CORES: self._on_host(redis_s, worker_s)}
        own = {WORKER: worker_s, (WORKER_OUT if out else WORKER_IN): seconds * of_worker}
        shared[NODE_IN if out else NODE_OUT] = seconds * of_node * self._node_share
        if self.setting.topology == "beside":  # the worker on the node's host uses the same link
            shared[NODE_OUT if out else NODE_IN] = seconds * of_worker / self.setting.workers
        if not out and self.setting.latency_s:
            chunk = nbytes / self.chunks
            own[ROUND_TRIPS] = 2 * self.setting.latency_s * nbytes / (self.setting.nodes * CHUNKS_AHEAD * chunk)
        return _activity(kind, shared, own)

    def _on_host(self, redis_s: float, peer_s: float = 0.0, aggregator_s: float = 0.0) -> float:
        """Return the seconds of the host's cores, of which it has several, that a step takes on the fullest host.

        `redis_s` is of all nodes together, `peer_s` of one worker, `aggregator_s` of one aggregator.
        """
        s = self.setting
        if s.topology == "local":
            total = redis_s + peer_s + aggregator_s
        elif s.topology == "one-host":
            total = redis_s + aggregator_s
        elif s.topology == "beside":
            total = redis_s * self.node_part + peer_s / s.workers + aggregator_s / s.aggregators
        else:
            total = redis_s * self.node_part
        return total / s.cores

    @cached_property
    def push(self) -> Activity:
        """A worker encodes its gradient and sends it."""
        c, keys = self._c, self.chunks
        redis_s = self.gradient_bytes * c.put_byte + keys * c.put_key
        encode = self.items * c.of_format(c.encode, self.setting.gradient_format)
        worker_s = c.worker_push + self.gradient_bytes * c.send_byte + encode
        return self._worker("push", True, self.gradient_bytes, redis_s, worker_s)

    @cached_property
    def pull(self) -> Activity:
        """A worker receives the weights."""
        c, keys = self._c, self.chunks
        redis_s = self.pulled_bytes * c.get_byte + keys * c.get_key
        decode = self.items * c.decode[self.setting.weight_format]
        worker_s = c.worker_pull + self.pulled_bytes * c.receive_byte + decode
        return self._worker("pull", False, self.pulled_bytes, redis_s, worker_s)

    def _script(self, kind: str, seconds: float, nbytes: float = 0.0, out: bool = True) -> Activity:
        link = 0.0 if self.local else nbytes / self.link
        shared = {REDIS: seconds, CORES: seconds / self.setting.cores, (NODE_OUT if out else NODE_IN): link}
        return _activity(kind, shared, {})

    @cached_property
    def accept(self) -> Activity:
        """`push.lua` accepts a contribution."""
        digests = self.setting.shards
        nbytes = _REQUEST_BYTES + digests * _DIGEST_BYTES
        return self._script("scripts", self._c.push + digests * self._c.push_digest, nbytes, out=False)

    @cached_property
    def turn(self) -> Activity:
        """A worker waits for its turn, and reads what the version is called."""
        return self._script("scripts", self._c.turn, _REQUEST_BYTES + 40 * self.setting.shards)

    # -- aggregators ---------------------------------------------------------------------------------------------

    @cached_property
    def early(self) -> int:
        """How many contributions an aggregator may hold before their plan is made."""
        shard = self.gradient_bytes / self.setting.shards
        return int(MOST_EARLY_BYTES / self.setting.shards / shard) if shard >= LEAST_EARLY_BYTES else 0

    @property
    def looks_at_inbox(self) -> bool:
        """Whether an aggregator lists what waits each time that it is woken."""
        return self.gradient_bytes / self.setting.shards >= LEAST_EARLY_BYTES

    def look(self, waiting: int) -> Activity:
        """An aggregator that was woken asks for the plan, which is not due, and lists what waits if that may pay."""
        c, n, digests = self._c, waiting * self.looks_at_inbox, self.setting.shards
        redis_s = c.plan + n * (c.inbox_contribution + digests * c.inbox_digest)
        nbytes = n * (_CONTRIBUTION_BYTES + digests * _DIGEST_BYTES)
        own = {AGGREGATOR: n * (c.parse_contribution + digests * c.parse_digest)}
        if self._aggregator_is_remote:
            own[AGGREGATOR_IN] = nbytes / self.link
        base = self._script("scripts", redis_s, nbytes if self._aggregator_is_remote else 0.0)
        return _activity("scripts", base.shared, own)

    @cached_property
    def fetch(self) -> Activity:
        """An aggregator fetches its part of one contribution before the plan is made."""
        part = self.aggregator_part
        redis_s = self.gradient_bytes * self._c.get_byte + self.chunks * self._c.get_key
        main = self.gradient_bytes * part * self._c.receive_byte
        return self._aggregator("fetch", self.gradient_bytes, 0.0, redis_s, {AGGREGATOR: main})

    def _aggregator(self, kind: str, nin: float, nout: float, redis_s: float, own: dict[str, float]) -> Activity:
        """An aggregator reads `nin` bytes of the whole job and stores `nout`, with what all aggregators take of Redis.

        Its shards take turns, so one node at a time serves it.
        """
        s, part = self.setting, self.aggregator_part
        each = 1 / s.aggregators
        threads = sum(own.values())
        shared = {REDIS: redis_s * self.node_part * each}
        shared[CORES] = self._on_host(redis_s, 0.0, threads * s.aggregators) * each
        if self._aggregator_is_remote:
            shared[NODE_OUT] = nin * self._node_share * each / self.link
            shared[NODE_IN] = nout * self._node_share * each / self.link
            own = own | {AGGREGATOR_IN: nin * part / self.link, AGGREGATOR_OUT: nout * part / self.link}
        own = own | {SERIAL: redis_s * part}
        return _activity(kind, shared, own)

    def aggregate(self, contributions: int, early: int) -> Activity:
        """An aggregator makes the next version of its shards: `early` of the contributions are there already."""
        s, c, part = self.setting, self._c, self.aggregator_part
        fetched = self.gradient_bytes * (contributions - early)
        keys = self.chunks * (contributions - early)
        staged_keys = self.chunks * self._staged_arrays
        redis_s = fetched * c.get_byte + keys * c.get_key + self.staged_bytes * c.put_byte + staged_keys * c.put_key
        redis_s += s.shards * c.stage_shard
        reduced = self.items * contributions * c.of_format(c.reduce, s.gradient_format)
        made = self.items * c.step[s.optimizer] + self.staged_bytes * c.send_byte
        main = part * (reduced + made + s.shards * (c.shard + contributions * c.shard_contribution)) + c.aggregate
        main += contributions * (c.parse_contribution + s.shards * c.parse_digest)
        own = {AGGREGATOR: main + part * fetched * c.receive_byte}
        return self._aggregator("aggregate", fetched, self.staged_bytes, redis_s, own)

    def plan(self, contributions: int) -> Activity:
        """`plan.lua` opens a plan, and an aggregator reads it."""
        c, digests = self._c, self.setting.shards
        seconds = c.plan + contributions * (c.plan_contribution + digests * c.plan_digest)
        return self._script("scripts", seconds, contributions * (_CONTRIBUTION_BYTES + digests * _DIGEST_BYTES))

    @cached_property
    def ready(self) -> Activity:
        """`ready.lua` notes one shard."""
        return self._script("scripts", self._c.ready + self.setting.shards * self._c.ready_shard)

    def commit(self, contributions: int) -> Activity:
        """What the last call of `ready.lua` does beyond."""
        each = self._c.commit_contribution + self.setting.shards * self._c.commit_digest
        return self._script("scripts", contributions * each)

    def free(self, contributions: int) -> Activity:
        """Redis frees the contributions and an old version, or gives their memory new names."""
        keys = self.chunks * (contributions + self._staged_arrays)
        seconds = keys * self._c.free_key * self.node_part
        return _activity("free", {REDIS: seconds, CORES: seconds / self.setting.cores}, {})

    # -- what is there, beyond time --------------------------------------------------------------------------------

    def node_memory(self) -> float:
        """Bytes of the fullest data node: versions, and gradients as many as may wait and those that follow them."""
        gradients = self.setting.workers * (self.setting.max_pending + 1) * self.gradient_bytes
        return self.node_part * (_VERSIONS * self.staged_bytes + gradients)

    def aggregator_memory(self) -> float:
        """Bytes of one aggregator: two versions of its shards with their state, and what it fetched early."""
        versions = 2 * (1 + SLOTS[self.setting.optimizer]) * self.weight_bytes * self.aggregator_part
        return versions + self.early * self.gradient_bytes * self.aggregator_part

    def round_bytes(self) -> dict[str, float]:
        """Return the bytes that all data nodes together receive and send in a round in which each worker pushes and
        pulls once and one version is made."""
        workers = self.setting.workers
        received = workers * self.gradient_bytes + self.staged_bytes
        return {"in": received, "out": workers * (self.gradient_bytes + self.pulled_bytes)}


def _activity(kind: str, shared: Mapping[str, float], own: Mapping[str, float]) -> Activity:
    """An activity without what takes no time."""
    return Activity(kind, {k: v for k, v in shared.items() if v > 0}, {k: v for k, v in own.items() if v > 0})
