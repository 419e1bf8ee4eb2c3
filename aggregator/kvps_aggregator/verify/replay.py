"""Proves a commit log in one process, without Redis: that it is one chain, and that its contributions make its weights.

The whole chain is checked first, which also tells which old versions contributions were computed on. Then the job is
replayed, from version 0 or a checkpoint, by the code that its aggregators ran, with gradients from a `Source`, and
every resulting digest is compared with the logged one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvps.arrays.digest import shard_digests, weights_sha256
from kvps.arrays.error_feedback import Residual
from kvps.arrays.formats import Bytes, encoded, format_of
from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.arrays.weight_view import VIEW
from kvps.config import JobConfig
from kvps.errors import CorruptData, NotFinite
from kvps.history.checkpoint import Checkpoint
from kvps.history.commit_log import Log
from kvps.protocol.job_state import Commit, State
from kvps.protocol.plan import Contribution, Plan
from kvps_aggregator.step.clipping import scale_of, square_sum
from kvps_aggregator.step.reduce import reduce_plan
from kvps_aggregator.step.shard_arrays import ShardArrays
from kvps_aggregator.verify.chain import Chain, Unproved, digest_of, located, settings_of
from kvps_aggregator.verify.contribution import Coding
from kvps_aggregator.verify.fates import Experience

Encode = Callable[[Array], Bytes]


class Source(Protocol):
    """The source of a replay's contributions. `proof` says what they are: "recomputed" or "recorded"."""

    proof: str
    wants_weights: bool

    def initial(self) -> Array:
        """Return the weights of version 0, (size,) float32. Raises Unproved."""

    def contribution(self, contribution: Contribution, weights: Array | None, encode: Encode) -> Bytes:
        """Return a contribution as it was on the wire: its recorded bytes, or `encode` of its (size,) float32 values.

        `weights` are those of its base version if the source wants them, else None. Raises Unproved.
        """

    def otherwise(self, contribution: Contribution, shard: int) -> str:
        """Return why a shard's part of the bytes from `contribution` may have another digest than the logged one."""


@dataclass(frozen=True)
class Proof:
    """The extent to which a log was proved.

    since                          the version that the chain begins after: 0 unless the log before it is missing
    commits, contributions, head   where the chain ends: the version, how many contributions went into it, its head
    replayed_since                 the version that the replay began with
    replayed                       how many commits came out bit for bit; `by` "recomputed", "recorded" or "" (neither)
    learners                       how many learners published the versions; 0 if workers train the job
    experience                     what became of the items that a learner took
    differences                    how many versions a difference that Redis still has makes of the version before
    weights_sha256                 the SHA-256 of the weights of `weights_version` in Redis
    differs                        the first commit that differs, and how; "" if there is none
    """

    since: int
    commits: int
    contributions: int
    head: str
    by: str
    replayed_since: int
    replayed: int
    weights_version: int
    weights_sha256: str
    differs: str
    learners: int = 0
    differences: int = 0
    experience: Experience = field(default_factory=Experience)


def prove(
    log: Log,
    state: State,
    config: JobConfig,
    layout: Layout,
    stored: tuple[int, Array],
    source: Source | None,
    start: Checkpoint | None = None,
) -> Proof:
    """Prove the log up to `state`, and that it made the weights `stored`: (version, (size,) float32).

    The log may hold later commits than `state`. The replay begins with `start`, or with version 0 if the log has it.
    """
    version, flat = stored
    own, config = config, log.first_settings(config)
    replay, made, differs = None, None, ""
    chain, again = (Chain(log.begin, state, layout.shards, config, own) for _ in range(2))
    logged: tuple[str, ...] = ()
    if not start and log.begin.version:
        source = None
    try:
        heads = {log.begin.version: log.begin.head}
        for commit in _until(log.commits(), state.version):
            chain.add(commit)
            logged = commit.shards if commit.version == version else logged
            if start and commit.version == start.version:
                heads[commit.version] = commit.head
        chain.end(state)
        if start and start.version < log.begin.version:
            gap = f"the log begins only after version {log.begin.version} (--checkpoints DIR may have more)"
            raise Unproved(f"version {start.version}: {gap}")
        if start and heads.get(start.version) != start.head:
            raise Unproved(f"version {start.version}: the checkpoint is not of this log, or the log does not reach it")
        if source:
            inherited = log.inherited() if format_of(config.gradient_format).lossy else {}
            replay = Replay(config, layout, source, chain.uses if source.wants_weights else {}, inherited, start)
            made = replay.weights() if version == replay.version else None
            for commit in _until(log.commits(), state.version):
                again.add(commit)  # the log may have been cut since, or written anew
                if commit.version > replay.version:
                    replay.add(commit)
                    made = replay.weights() if commit.version == version else made
        with located(f"version {version}"):
            _compare(layout, flat, logged, made)
    except (Unproved, CorruptData) as reason:
        differs = str(reason)
    since = start.version if start else 0
    return Proof(
        since=log.begin.version,
        commits=chain.version,
        contributions=chain.contributions,
        head=chain.head,
        by=source.proof if source else "",
        replayed_since=since,
        replayed=replay.version - since if replay else 0,
        weights_version=version,
        weights_sha256=weights_sha256(flat),
        differs=differs,
        learners=len(chain.learners),
    )


def _compare(layout: Layout, flat: Array, logged: tuple[str, ...], made: Array | None) -> None:
    """Compare the weights in Redis with what their commit logged, and with what a replay made. Raises Unproved."""
    as_logged = layout.of_shards(len(logged) or layout.shards)  # that of a job before a restore may differ
    for shard, (digest, entry) in enumerate(zip(shard_digests(as_logged, flat), logged, strict=False)):
        if digest != digest_of(entry):
            raise Unproved(f"the weights of shard {shard} in Redis are not those that were committed")
    if made is not None and weights_sha256(made) != weights_sha256(flat):
        raise Unproved("the weights in Redis are not those that the replay made")


def _until(log: Iterable[Commit], version: int) -> Iterator[Commit]:
    """Yield the commits up to a version, without those made meanwhile."""
    if version:
        for commit in log:
            yield commit
            if commit.version >= version:
                return


class Replay:
    """A job computed again, up to `version`. It keeps the old versions in `uses` until their last use.

    It begins with `start`, or else with the source's version 0. `inherited` is what `Log.inherited` returns.
    """

    def __init__(
        self,
        config: JobConfig,
        layout: Layout,
        source: Source,
        uses: Mapping[int, int],
        inherited: Mapping[tuple[str, str], str],
        start: Checkpoint | None = None,
    ) -> None:
        self.version = start.version if start else 0
        self._config = config
        self._source = source
        self._uses = uses
        self._kept: dict[int, Array] = {}
        self._format = format_of(config.gradient_format)
        self._inherited = inherited
        self._remainders: dict[str, Residual] = {}
        self._seqs: dict[str, tuple[str, int]] = {}
        self._is_late_start = start is not None
        with located("version 0"):
            weights = start.weights if start else source.initial()
        self._cut(layout, weights, start.slots if start else {}, start.skipped if start else {})
        self._keep()

    def _cut(self, layout: Layout, weights: Array, slots: Mapping[str, Array], skipped: Mapping[int, int]) -> None:
        """Go on from these arrays, (size,) float32, cut into the shards of `layout`."""
        self._layout = layout
        self._parts = [ShardArrays(self._config, layout, shard) for shard in range(layout.shards)]
        for part in self._parts:
            part.skipped = skipped
            np.copyto(part.weights, weights[part.low : part.high])
            view = {VIEW: weights} if VIEW in part.slots else {}
            for slot, array in {**view, **slots}.items():
                np.copyto(part.state[slot], array[part.low : part.high])

    def weights(self) -> Array:
        """Return a copy of the weights, (size,) float32."""
        return np.concatenate([part.weights for part in self._parts])

    def add(self, commit: Commit) -> None:
        """Make the next version from its commit. Raises Unproved."""
        before, self._config = self._config, settings_of(commit, self._config)
        if len(commit.shards) != len(self._parts) or self._config != before:  # restored, and other than before
            slots = {slot: np.concatenate([part.state[slot] for part in self._parts]) for slot in self._parts[0].slots}
            self._cut(self._layout.of_shards(len(commit.shards)), self.weights(), slots, self._parts[0].skipped)
        with located(f"commit {commit.version}"):
            try:
                gradient = self._gradient(commit.plan)
                self._clip(gradient[: self._layout.buffer_start])
                for part in self._parts:
                    for chunk in part.chunks:
                        part.apply(commit.plan, chunk, gradient[chunk.start : chunk.stop])
            except NotFinite as error:  # no log has a version that is not finite
                raise Unproved(str(error)) from None
            for shard, part in enumerate(self._parts):
                if part.digest(part.next_weights) != digest_of(commit.shards[shard]):
                    raise Unproved(f"its contributions make other weights of shard {shard} than those logged")
        for part in self._parts:
            part.promote()
        self.version = commit.version
        self._keep()

    def _gradient(self, plan: Plan) -> Array:
        """Return the gradient that a plan's contributions make, and behind it the buffers, (size,) float32, reduced as
        its aggregators did."""
        gradient: Array = np.zeros(self._layout.size, DTYPE)
        values = self._counting(plan)
        start, kind = self._layout.buffer_start, self._layout.buffer_kind
        if not self._layout.parts:
            reduce_plan(self._config, plan, plan.counting, values, gradient[:start], gradient[start:], kind)
            return gradient
        each = list(zip(plan.counting, values, strict=True))  # all at once: each chunk has contributions of its own
        for chunk in filter(plan.has, self._layout.chunks_in("")):
            part_of = slice(chunk.start, chunk.stop)
            parts = [array[part_of] for c, array in each if chunk.in_part(c.part)]
            reduce_plan(self._config, plan, plan.counting_in(chunk), parts, gradient[part_of], gradient[start:], kind)
        return gradient

    def _clip(self, gradient: Array) -> None:
        """Clip a gradient, (n,) float32, in place, if the job does."""
        if clip_norm := self._config.optimizer.clip_norm:
            sums = [sum(square_sum(gradient[c.start : c.stop]) for c in part.chunks) for part in self._parts]
            np.multiply(gradient, scale_of(clip_norm, sums), out=gradient)

    def _counting(self, plan: Plan) -> Iterator[Array]:
        """Yield the values of a plan's contributions that count, in its order."""
        for contribution in plan.rejected if self._format.lossy else ():
            self._seqs[contribution.worker] = contribution.incarnation, contribution.seq
            self._remainders.pop(contribution.worker, None)  # the log does not tell what it left out
        for contribution in plan.contributions:
            if self._format.lossy:
                self._follow(contribution)
            if contribution.weight:
                yield self._values(contribution).copy()  # the source may return the same memory again

    def _follow(self, c: Contribution) -> None:
        """Keep the worker's residual only if it is known to be the one before this contribution.

        A contribution that counts as zeros keeps it, and so does a dropped one, which is in no log. An incarnation
        inherits a stored residual, or begins with zeros.
        """
        before, self._seqs[c.worker] = self._seqs.get(c.worker), (c.incarnation, c.seq)
        drops = self._config.late == "drop"
        first = c.seq == 1 or (drops and not self._is_late_start and (before is None or before[0] != c.incarnation))
        behind: str | None = f"{c.incarnation}:{c.seq - 1}:"
        if first:
            behind = self._inherited.get((c.worker, c.incarnation))
        if behind == "":
            self._remainders[c.worker] = Residual(self._format, np.zeros(self._layout.size, DTYPE))
        elif behind is None or before is None or not _comes_next(before, behind, drops):
            self._remainders.pop(c.worker, None)

    def _values(self, c: Contribution) -> Array:
        """Return the values that the aggregators added, (size,) float32. Raises Unproved."""
        with located(f"contribution {c.seq} of {c.worker} (round {c.round}, on version {c.base})"):
            base = self._kept.get(c.base)
            if base is None and self._source.wants_weights:
                raise Unproved("its weights are older than the checkpoint: begin with an earlier one")
            coding = Coding(self._layout, self._format, c.part)
            data = self._source.contribution(c, base, lambda values: coding.encode(values, self._residual(c)))
            for shard, digest in enumerate(coding.digests(data)):
                if digest != c.digests[shard]:
                    raise Unproved(f"shard {shard}: {self._source.otherwise(c, shard)}")
            return coding.decode(data)

    def _residual(self, c: Contribution) -> Residual | None:
        """Return the residual before this contribution, None for a lossless format. Raises Unproved if unknown."""
        if not self._format.lossy:
            return None
        if c.worker not in self._remainders:
            raise Unproved(
                f"the {self._format.name} residual of its worker is unknown, because the contributions before it are "
                f"not in this replay: begin with an earlier checkpoint, or use a record"
            )
        return self._remainders[c.worker]

    def _keep(self) -> None:
        self._kept = {base: flat for base, flat in self._kept.items() if self._uses[base] > self.version}
        if self.version in self._uses:
            self._kept[self.version] = self._pulled()

    def _pulled(self) -> Array:
        """Return the present weights as workers pulled them, (size,) float32."""
        if VIEW in self._config.slots:
            return np.concatenate([part.state[VIEW] for part in self._parts])
        weights, format_ = self.weights(), format_of(self._config.weight_format)
        if format_.lossy:
            format_.decode(encoded(format_, weights), weights)
        return weights


def _comes_next(before: tuple[str, int], behind: str, drops: bool) -> bool:
    """Return whether a residual named `behind` is that after the contribution `before`: its incarnation and number.

    If the job `drops` late contributions, such may have come in between, and left the residual as it was.
    """
    incarnation, seq, *_ = behind.split(":")
    return incarnation == before[0] and (int(seq) == before[1] or (drops and int(seq) > before[1]))
