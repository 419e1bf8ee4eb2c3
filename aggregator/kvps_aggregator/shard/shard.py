"""A shard in the hands of its holder: weights and optimizer state in memory, the next version, the bytes to free.

The next version is computed beside the present one, never over it: if the plan is replaced, or another holder
commits, the present one is still what is committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from pathlib import Path

from kvps.arrays.digest import Buffers, digest_of, fold
from kvps.arrays.formats import Bytes, encoded, format_of
from kvps.arrays.layout import CHUNK_BYTES, DTYPE, Array, Chunk
from kvps.connection.sockets import ChunkGone
from kvps.device.base import CPU, Device
from kvps.errors import CorruptData, ServerFull
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps.protocol.keys import staged_name
from kvps.protocol.plan import Contribution, Plan
from kvps.protocol.scripts import CommitResult
from kvps_aggregator.shard.eager_fetch import EagerFetch
from kvps_aggregator.shard.fetch import ContributionFetch
from kvps_aggregator.step.device_step import DeviceStep
from kvps_aggregator.step.shard_arrays import ShardArrays
from kvps_aggregator.verify.recording import Recorder

_LINGER_BYTES = 32 << 20  # what the versions of a small job may take together; of a large one two are kept
_LINGER_VERSIONS = 64
_REUSED_BYTES = 1 << 20  # smaller shards' memory is never freed in large stretches
_RESERVE_PART = 64 << 20  # Redis fills this much in some ten milliseconds


class Shard:
    """One shard, held under `term`. Used by the aggregator's loop alone.

    `record` is where contributions are kept, `device` where they are reduced.

    begun    the plan for which bytes of the next version may have been stored
    staged   that plan, when all of them are there
    early    contributions that came before their plan
    """

    def __init__(self, job: Job, number: int, term: str, record: Path | None = None, device: Device = CPU) -> None:
        self.number = number
        self.term = term
        self.version, self._run_id = 0, ""
        self.begun: Plan | None = None
        self.staged: Plan | None = None
        self._job = job
        self._part = (
            ShardArrays(job.config, job.layout, number)
            if device is CPU
            else DeviceStep(job.config, job.layout, number, device)
        )
        self._format, self._pull = format_of(job.config.gradient_format), format_of(job.config.weight_format)
        sizes = [self._format.nbytes(chunk.stop - chunk.start) for chunk in self._part.chunks]
        self.early = EagerFetch(job.client, job.layout.shards, sizes, self._gradient_keys)
        self._record = record
        self._recorder: Recorder | None = None
        # A small model is two versions further within a millisecond, and a reader that lost its processor for a
        # moment would chase it: its old versions stay a little longer.
        pulled = self._pull.nbytes(job.layout.size) if self._pull.lossy else 0
        nbytes = job.layout.nbytes * (1 + len(self._part.slots)) + pulled
        # A version, and two chunks on their way through the server's own buffers, which count too.
        self._reserve = -(-nbytes * self._part.size // job.layout.size) + 2 * CHUNK_BYTES
        self._kept_versions = max(2, min(_LINGER_VERSIONS, _LINGER_BYTES // nbytes))
        self._names: dict[int, str] = {}  # versions whose bytes are still there
        self._dead: list[str] = []
        self._reused: list[tuple[str, str]] = []
        self._limited = bool(job.client.memory()[1])
        self._gave_up_reserve = False
        self._whole = nbytes <= job.client.small_bytes
        self._unsent: list[tuple[str, Buffers]] = []

    # -- what the last holder left -----------------------------------------------------------------------------

    def load(self, state: State, before: str, pinned: tuple[int, str] | None) -> None:
        """Read the committed weights and optimizer state. Raises CorruptData if they are not what was committed.

        `before` is the shard's staged name one version ago, `pinned` version and name that a slow reader holds.
        """
        self.version, self._run_id, name = state.version, state.run_id, state.names[self.number]
        try:
            self._load_bytes(name)
        except ChunkGone as gone:
            raise CorruptData(
                f"version {self.version} of job {self._job.name!r}, shard {self.number}: {gone}"
            ) from None
        if self._record:
            self._recorder = Recorder(self._record, self._job.name, state.id, self.number)
        if self.version:
            self._check_manifest(name)
        elif self._recorder:
            self._recorder.initial(self._part.weights, self._part.digest(self._part.weights))
        self._part.loaded()
        self._names = {self.version: name} if before == name else {self.version - 1: before, self.version: name}
        if pinned:
            self._names.setdefault(pinned[0], pinned[1])
        self.begun = self.staged = None

    def _load_bytes(self, name: str) -> None:
        """Have the bytes of the version of this name in the part. Raises ChunkGone."""
        self._read(self._part.weights, self._keys("w", name))
        for slot in self._part.slots:
            if self.version:
                self._read(self._part.state[slot], self._keys(slot, name))
            else:
                self._part.state[slot].fill(0)

    def close(self) -> None:
        """Nothing of this shard is used here any more."""

    def flush(self) -> None:
        """Leave in Redis all that is committed. Raises KvpsError."""

    def finish(self) -> None:
        """The job is finished: leave nothing elsewhere than in Redis. Raises KvpsError."""
        self.flush()

    @property
    def fetches_early(self) -> bool:
        """Whether it is worth to fetch contributions before their plan is made."""
        return self.early.worth

    def live_names(self) -> set[str]:
        """The staged names that may still be read, or become a version."""
        return {*self._names.values(), self._next_name}

    def bury(self, keys: Sequence[str]) -> None:
        """Have keys of this slot deleted with the next `free`."""
        self._dead += keys

    def _check_manifest(self, name: str) -> None:
        text = self._job.client.call("GET", self._job.keys.manifest(self.number, name))
        digests = self._digests(self._part.weights, self._part.state)
        if not text or json.loads(text)["digests"] != digests:
            raise CorruptData(
                f"version {self.version} of job {self._job.name!r}, shard {self.number}: the bytes differ from what "
                f"was committed; something else wrote under {self._job.keys.weights(self.number, name, 0)}"
            )

    # -- the next version --------------------------------------------------------------------------------------

    def make(self, plan: Plan) -> str:
        """Compute the next version and store it under this term's name, manifest last; the digest of its weights. A
        small one is stored by `commit`.

        Chunk by chunk: while one is reduced and stepped, the next contributions are on their way here and the last
        results on their way back. Raises BadContribution.
        """
        self.begun = plan
        job, part, name = self._job, self._part, staged_name(plan.version, self.term)
        counted = [(c, self._gradient_keys(c)) for c in plan.contributions if c.weight]
        digests: dict[str, list[str]] = {}
        items: list[tuple[str, Buffers]] = []
        try:
            with (
                self._staging(name),
                ContributionFetch(
                    job.client, self.number, part.chunks, counted, self._here, self._format, self._recorder
                ) as intake,
                nullcontext(_later) if self._whole else job.client.putting(wait_for_room=False) as put,
            ):
                with closing(self._each(lambda chunk: self._step(plan, chunk, intake))) as stepped:
                    for chunk, said in zip(part.chunks, stepped, strict=True):
                        for what, digest in said.items():
                            digests.setdefault(what, []).append(digest)
                        for item in self._items(name, chunk):
                            items.append(item)
                            put(*item)
                intake.check()
                folded = {what: fold(each) for what, each in digests.items()}
                items.append((job.keys.manifest(self.number, name), [self._manifest(plan, folded)]))
                put(*items[-1])
        except ServerFull:
            if not items:
                raise
            self._make_room()
            job.client.put(items)
        self._unsent, self.staged = (items, None) if self._whole else ([], plan)
        return folded["w"]

    def _step(self, plan: Plan, chunk: Chunk, intake: ContributionFetch) -> dict[str, str]:
        """Make a chunk of the next version; the digest of each of its arrays."""
        if not self._part.step(plan, chunk, intake.parts(chunk)):
            intake.suspect(chunk)
        return {what: digest_of([made]) for what, made in self._part.made(chunk).items()}

    def _each(self, step: Callable[[Chunk], dict[str, str]]) -> Generator[dict[str, str], None, None]:
        """What `step` returns for each chunk, in order."""
        yield from map(step, self._part.chunks)

    def _here(self, c: Contribution) -> list[Bytes] | None:
        """The chunks of a contribution, if they need not be fetched."""
        return self.early.get(c)

    def _staging(self, name: str) -> AbstractContextManager[None]:
        """Around the making of the version of this name. Raises ServerFull."""
        return nullcontext()

    def _items(self, name: str, chunk: Chunk) -> Iterator[tuple[str, Buffers]]:
        """What Redis is given of a chunk of the next version: keys and values."""
        for what, made in self._part.made(chunk).items():
            yield self._key(what, name, chunk), [made]
        if self._pull.lossy:
            shorter = encoded(self._pull, self._part.stretch(self._part.next_weights, chunk))
            yield self._job.keys.pulled(self.number, name, chunk.number), [shorter.data]

    def commit(self, plan: Plan, digest: str) -> CommitResult:
        """Say that this part is ready, `digest` being its weights'; a small one is stored in the same step.

        Raises LeaseLost, PlanGone, ServerRestarted, ServerFull.
        """
        client, scripts, said = self._job.client, self._job.scripts, (self.number, self.term, plan, digest)
        if self._unsent:
            try:
                stored = partial(client.put_and_call, self._unsent, wait_for_room=False)
                flip = scripts.through(stored).ready(*said)
                self.staged = plan
                return flip
            except ServerFull:
                self._make_room()
                client.put(self._unsent)
            self.staged = plan
        return scripts.ready(*said)

    def _manifest(self, plan: Plan, digests: Mapping[str, str]) -> memoryview:
        said = {"plan": plan.id, "version": plan.version, "head": plan.head, "bytes": self._part.size * DTYPE.itemsize}
        return memoryview(json.dumps(said | {"digests": digests}).encode())

    def _make_room(self) -> None:
        """Give up what a commit can do without: only commits free the memory that gradients take."""
        for version in [v for v in self._names if v < self.version]:
            self._bury_version(version)  # its readers find it gone, and read the present one
        self.bury(self._reserve_keys())
        self.free()
        self._gave_up_reserve = True

    def keep_reserve(self) -> None:
        """On a server whose memory is limited, hold room for one version more. Raises nothing if there is none."""
        with suppress(ServerFull):
            self._gave_up_reserve = False
            used, limit = self._job.client.memory()
            self._limited = bool(limit)  # it may have been set since
            for part, key in enumerate(self._reserve_keys() if limit else []):
                size = min(_RESERVE_PART, self._reserve - part * _RESERVE_PART)
                if used + 2 * size < limit and not self._job.client.call("EXISTS", key):
                    self._job.client.call("SETRANGE", key, size - 1, "\0")

    def _reserve_keys(self) -> list[str]:
        return [self._job.keys.reserve(self.number, part) for part in range(-(-self._reserve // _RESERVE_PART))]

    @property
    def staged_as(self) -> str:
        """The name under which the next version is staged."""
        assert self.staged is not None
        return staged_name(self.staged.version, self.term)

    def promote(self, pinned_version: int | None) -> None:
        """The staged version is committed: go on from it, and free what no reader can want any more."""
        plan = self.staged
        assert plan is not None
        self._part.promote()
        self.version, self.begun, self.staged = plan.version, None, None
        self._names[plan.version] = staged_name(plan.version, self.term)
        if self._expects:
            self.early.expect(plan.contributions + plan.rejected)
        for contribution in plan.contributions + plan.rejected:
            if contribution.weight:
                self._bury_contribution(contribution)
        for version in [v for v in self._names if v <= self.version - self._kept_versions and v != pinned_version]:
            self._bury_version(version, reuse=self._reuses)

    @property
    def _reuses(self) -> bool:
        """Whether dead bytes are given the names of those that come next.

        Redis's allocator returns memory to the kernel that is freed in large stretches, and gets it back page by
        page: a round took twice as long. A server that is short of memory is better off without.
        """
        return self._part.size * DTYPE.itemsize >= _REUSED_BYTES and not self._limited

    @property
    def _expects(self) -> bool:
        """Whether the next contributions are asked for before they are known."""
        return not self._reuses  # else what is there under the next name may be what died

    def _bury_contribution(self, c: Contribution) -> None:
        keys = self._gradient_keys(c)
        if self._reuses:  # so many of a worker's may wait: this name is the first that cannot have been sent before
            then = self._gradient_keys(c._replace(seq=c.seq + self._job.config.max_pending))
            self._reused += zip(keys, then, strict=True)
        else:
            self._dead += keys

    def _bury_version(self, version: int, reuse: bool = False) -> None:
        name = self._names.pop(version)
        self._dead.append(self._job.keys.manifest(self.number, name))
        keys = self._version_keys(name)
        if reuse:
            self._reused += zip(keys, self._version_keys(self._next_name), strict=True)
        else:
            self._dead += keys

    def retire(self) -> None:
        """Nothing more will be stored: bury what was kept for that."""
        self.bury(self._version_keys(self._next_name))

    def free(self) -> None:
        """Delete the bytes that died.

        Raises LeaseLost if another may do that now, ServerRestarted if they may live again.
        """
        dead, reused = self._dead, self._reused
        self._dead, self._reused = [], []
        self._job.scripts.free(self.number, self.term, self._run_id, dead, reused)
        if self._gave_up_reserve and not self.begun:  # before the next gradients take the room
            self.keep_reserve()

    @property
    def _next_name(self) -> str:
        """The name under which this term stages the version behind the present one."""
        return staged_name(self.version + 1, self.term)

    # -- bytes -------------------------------------------------------------------------------------------------

    def _key(self, what: str, name: str, chunk: Chunk) -> str:
        """The key of a chunk of the weights ("w"), or of a slot of the optimizer."""
        return self._job.keys.array(self.number, what, name, chunk.number)

    def _keys(self, what: str, name: str) -> list[str]:
        return [self._key(what, name, chunk) for chunk in self._part.chunks]

    def _version_keys(self, name: str) -> list[str]:
        """The keys of all chunks of a version, but for its manifest."""
        keys = [key for what in ("w", *self._part.slots) for key in self._keys(what, name)]
        if self._pull.lossy:
            keys += [self._job.keys.pulled(self.number, name, chunk.number) for chunk in self._part.chunks]
        return keys

    def _gradient_keys(self, c: Contribution) -> list[str]:
        keys = self._job.keys
        return [keys.gradient(self.number, c.worker, c.incarnation, c.seq, chunk.number) for chunk in self._part.chunks]

    def _read(self, target: Array, keys: list[str]) -> None:
        self._job.client.get(list(zip(keys, self._part.stretches(target), strict=True)))

    def _digests(self, weights: Array, state: Mapping[str, Array]) -> dict[str, str]:
        """What the manifest says of a version."""
        return {name: self._part.digest(array) for name, array in {"w": weights, **state}.items()}


def _later(key: str, value: Buffers) -> None:
    """Stores nothing yet."""
