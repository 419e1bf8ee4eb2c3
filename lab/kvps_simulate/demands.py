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
from kvps.protocol.bounds import LEAST_EARLY_BYTES, MOST_EARLY_BYTES
from kvps_simulate.fluid import Activity
from kvps_simulate.settings import Constants, Setting

REDIS, NODE_IN, NODE_OUT, CORES = "Redis core", "node link in", "node link out", "cores of the node's host"
WORKER, WORKER_IN, WORKER_OUT = "worker core", "worker link in", "worker link out"
# A thread of the aggregator receives while another sums; but Python runs one at a time, and they take what one core is.
AGGREGATOR, AGGREGATOR_IN, AGGREGATOR_OUT = "aggregator core", "aggregator link in", "aggregator link out"
ROUND_TRIPS, SERIAL = "worker round trips of pulls", "aggregator waits for one node at a time"
_DIGEST_BYTES = 17  # of a shard's part of a contribution, with its comma
_CONTRIBUTION_BYTES = 110  # of its text without digests, in inbox, plan and log
_REQUEST_BYTES = 700  # of a call of push or of a turn, with its reply


class Demands:
    """What each step of a job costs on its hosts."""

    def __init__(self, setting: Setting, constants: Constants) -> None:
        self.setting = s = setting
        self._c = constants
        self.items = s.size / DTYPE.itemsize
        self.gradient_bytes = self._encoded(s.gradient_format)
        self.pulled_bytes = self._encoded(s.weight_format)
        self.staged_bytes = s.size + (self.pulled_bytes if s.weight_format != "fp32" else 0)
        self._staged_arrays = 1 + (s.weight_format != "fp32")
        self.chunks = s.shards * max(1, math.ceil(s.size / s.shards / CHUNK_BYTES))
        self.node_part = math.ceil(s.shards / s.nodes) / s.shards
        self.link = s.bandwidth / 8
        self.local = s.local

    def _encoded(self, name: str) -> float:
        chunk = min(self.items, CHUNK_BYTES // DTYPE.itemsize)
        return format_of(name).nbytes(round(chunk)) * self.items / round(chunk)

    def _worker(self, out: bool, nbytes: float, redis_s: float, worker_s: float) -> Activity:
        shared = {REDIS: redis_s * self.node_part, CORES: self._on_host(redis_s, worker_s)}
        own = {WORKER: worker_s}
        if not self.local:
            own[WORKER_OUT if out else WORKER_IN] = nbytes / self.link
            shared[NODE_IN if out else NODE_OUT] = nbytes / self.link * self.node_part
        if not out and self.setting.latency_s:
            own[ROUND_TRIPS] = 2 * self.setting.latency_s * self.chunks / (self.setting.nodes * CHUNKS_AHEAD)
        return _activity(shared, own)

    def _on_host(self, redis_s: float, peer_s: float = 0.0, aggregator_s: float = 0.0) -> float:
        """Return the seconds of the cores that a step takes on the fullest host. `redis_s` is of all nodes together,
        `peer_s` of one worker, `aggregator_s` of all aggregators."""
        total = redis_s + peer_s + aggregator_s if self.local else redis_s * self.node_part
        return total / self.setting.cores

    @cached_property
    def push(self) -> Activity:
        """A worker encodes its gradient and sends it."""
        c, keys = self._c, self.chunks
        redis_s = self.gradient_bytes * c.put_byte + keys * c.put_key
        encode = self.items * c.encode[_kind(self.setting.gradient_format)]
        worker_s = c.worker_push + self.gradient_bytes * c.send_byte + encode
        return self._worker(True, self.gradient_bytes, redis_s, worker_s)

    @cached_property
    def pull(self) -> Activity:
        """A worker receives the weights."""
        c, keys = self._c, self.chunks
        redis_s = self.pulled_bytes * c.get_byte + keys * c.get_key
        decode = self.items * c.decode[self.setting.weight_format]
        worker_s = c.worker_pull + self.pulled_bytes * c.receive_byte + decode
        return self._worker(False, self.pulled_bytes, redis_s, worker_s)

    def _script(self, seconds: float, nbytes: float = 0.0, out: bool = True) -> Activity:
        link = 0.0 if self.local else nbytes / self.link
        shared = {REDIS: seconds, CORES: seconds / self.setting.cores, (NODE_OUT if out else NODE_IN): link}
        return _activity(shared, {})

    @cached_property
    def accept(self) -> Activity:
        """`push.lua` accepts a contribution."""
        digests = self.setting.shards
        nbytes = _REQUEST_BYTES + digests * _DIGEST_BYTES
        return self._script(self._c.push + digests * self._c.push_digest, nbytes, out=False)

    @cached_property
    def turn(self) -> Activity:
        """A worker waits for its turn, and reads what the version is called."""
        return self._script(self._c.turn, _REQUEST_BYTES + 40 * self.setting.shards)

    @cached_property
    def early(self) -> int:
        """How many contributions an aggregator may hold before their plan is made. If any, it lists what waits each
        time that it is woken."""
        enough = self.gradient_bytes / self.setting.shards >= LEAST_EARLY_BYTES
        return int(MOST_EARLY_BYTES / self.gradient_bytes) if enough else 0

    def look(self, waiting: int) -> Activity:
        """An aggregator that was woken asks for the plan, which is not due, and lists what waits if that may pay."""
        c, n, digests = self._c, waiting if self.early else 0, self.setting.shards
        redis_s = c.plan + n * (c.inbox_contribution + digests * c.inbox_digest)
        nbytes = n * (_CONTRIBUTION_BYTES + digests * _DIGEST_BYTES)
        own = {AGGREGATOR: n * (c.parse_contribution + digests * c.parse_digest)}
        if not self.local:
            own[AGGREGATOR_IN] = nbytes / self.link
        return _activity(self._script(redis_s, nbytes).shared, own)

    @cached_property
    def fetch(self) -> Activity:
        """An aggregator fetches its part of one contribution before the plan is made."""
        redis_s = self.gradient_bytes * self._c.get_byte + self.chunks * self._c.get_key
        main = self.gradient_bytes * self.node_part * self._c.receive_byte
        return self._aggregator(self.gradient_bytes, 0.0, redis_s, {AGGREGATOR: main})

    def _aggregator(self, nin: float, nout: float, redis_s: float, own: dict[str, float]) -> Activity:
        """An aggregator reads `nin` bytes of the whole job and stores `nout`, with what all aggregators take of Redis.

        Its shards take turns, so one node at a time serves it.
        """
        part, each = self.node_part, 1 / self.setting.nodes
        shared = {REDIS: redis_s * part * each}
        shared[CORES] = self._on_host(redis_s, 0.0, sum(own.values()) / each) * each
        if not self.local:
            shared |= {NODE_OUT: nin * part * each / self.link, NODE_IN: nout * part * each / self.link}
            own = own | {AGGREGATOR_IN: nin * part / self.link, AGGREGATOR_OUT: nout * part / self.link}
        own = own | {SERIAL: redis_s * part}
        return _activity(shared, own)

    def aggregate(self, contributions: int, early: int) -> Activity:
        """An aggregator makes the next version of its shards: `early` of the contributions are there already."""
        s, c, part = self.setting, self._c, self.node_part
        fetched = self.gradient_bytes * (contributions - early)
        redis_s = fetched * c.get_byte + self.chunks * (contributions - early) * c.get_key + s.shards * c.stage_shard
        redis_s += self.staged_bytes * c.put_byte + self.chunks * self._staged_arrays * c.put_key
        reduced = self.items * contributions * c.reduce[_kind(s.gradient_format)]
        made = self.items * c.step["sgd"] + self.staged_bytes * c.send_byte
        main = part * (reduced + made + s.shards * (c.shard + contributions * c.shard_contribution)) + c.aggregate
        main += contributions * (c.parse_contribution + s.shards * c.parse_digest)
        own = {AGGREGATOR: main + part * fetched * c.receive_byte}
        return self._aggregator(fetched, self.staged_bytes, redis_s, own)

    def plan(self, contributions: int) -> Activity:
        """`plan.lua` opens a plan, and an aggregator reads it."""
        c, digests = self._c, self.setting.shards
        seconds = c.plan + contributions * (c.plan_contribution + digests * c.plan_digest)
        return self._script(seconds, contributions * (_CONTRIBUTION_BYTES + digests * _DIGEST_BYTES))

    @cached_property
    def ready(self) -> Activity:
        """`ready.lua` notes one shard."""
        return self._script(self._c.ready + self.setting.shards * self._c.ready_shard)

    def commit(self, contributions: int) -> Activity:
        """What the last call of `ready.lua` does beyond."""
        each = self._c.commit_contribution + self.setting.shards * self._c.commit_digest
        return self._script(contributions * each)

    def free(self, contributions: int) -> Activity:
        """Redis frees the contributions and an old version, or gives their memory new names."""
        keys = self.chunks * (contributions + self._staged_arrays)
        seconds = keys * self._c.free_key * self.node_part
        return _activity({REDIS: seconds, CORES: seconds / self.setting.cores}, {})

    def round_bytes(self) -> dict[str, float]:
        """Return the bytes that all data nodes together receive and send in a round in which each worker pushes and
        pulls once and one version is made."""
        workers = self.setting.workers
        received = workers * self.gradient_bytes + self.staged_bytes
        return {"in": received, "out": workers * (self.gradient_bytes + self.pulled_bytes)}


def _activity(shared: Mapping[str, float], own: Mapping[str, float]) -> Activity:
    """An activity without what takes no time."""
    return Activity({k: v for k, v in shared.items() if v > 0}, {k: v for k, v in own.items() if v > 0})


def _kind(name: str) -> str:
    """Return "topk" for "topk:0.01": what an item costs is the same for every part."""
    return name.partition(":")[0]
