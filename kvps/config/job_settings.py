"""The settings of a job as keywords of calls. `python docs/settings.py` writes this module."""

from __future__ import annotations

from typing import Literal, TypedDict

from kvps.optim import Optimizer


class JobSettings(TypedDict, total=False):
    """The keywords of `Store.create_job`, `kvps.local` and `RunContext.create_job`; docs/settings.md explains each."""

    staleness: int
    """Default 0. How many rounds a worker may be ahead of the slowest: 0 is BSP, N is SSP, -1 is ASP, which has no
    bound."""
    workers: int
    """Default 1. How many workers train."""
    shards: int
    """Default 1. Into how many parts the parameters are cut."""
    optimizer: Optimizer | str
    """Default kvps.SGD(). How the aggregator updates the weights: adadelta, adagrad, adam, adamw, adamax, delayed-
    nesterov, lion, nadam, rmsprop, sgd, yogi; as in sgd:momentum=0.9."""
    local_steps: int
    """Default 1. How many steps a worker takes with an optimizer of its own between two pulls."""
    fragments: int
    """Default 0. In how many fragments local steps synchronize the model, one after another: after every local_steps /
    fragments steps a worker pushes one fragment and pulls that one, and keeps its own weights of the others."""
    reduction: str
    """Default "mean". How contributions become one gradient: mean divides their sum by the number of members, sum does
    not; weighted is their mean by the weights that workers push, as the number of samples; median and trimmed:PART are
    of each item, and bear some bad workers."""
    staleness_scaling: Literal["none", "inverse", "inverse-sqrt"]
    """Default "none". What a contribution is multiplied by that was computed on a version s versions old: none, inverse
    is 1/(1+s), inverse-sqrt is 1/sqrt(1+s)."""
    gradient_format: str
    """Default "fp32". How gradients are sent: fp32 as they are, or shorter: bf16, fp16, int8, topk:PART."""
    weight_format: str
    """Default "fp32". How workers pull the weights: fp32 as they are, bf16 rounded, or int8 or topk:PART of what has
    changed since the version that the worker has."""
    transport: Literal["auto", "redis", "shm"]
    """Default "auto". How arrays move: redis, through the server; shm, through memory that worker and aggregator share
    on one host; auto, which is shm for a model of 1 MiB or more if only this host can reach the server."""
    nonfinite: Literal["reject", "skip"]
    """Default "reject". What happens to a gradient with NaN or Inf: reject refuses it, skip counts it as zeros."""
    missing: Literal["auto", "zeros", "skip"]
    """Default "auto". What becomes of a parameter for which a contribution has no gradient: with zeros it counts as
    zeros, and momentum and weight decay go on."""
    quorum: int
    """Default 0. With staleness 0 or -1: how many contributions a version waits for."""
    grace_ms: int
    """Default 0. How much longer a version waits for the other workers once its quorum is there."""
    late: Literal["next", "drop"]
    """Default "next". What becomes of a contribution that comes after its version was made of a quorum: next counts it
    in the next version; drop refuses it."""
    reject_norm: float | None
    """Default None. Rejects a contribution whose norm is more than so many times the median norm of its version's
    contributions, of which there must be three; the reason is logged."""
    worker_timeout_ms: int
    """Default 10000. How long a worker may be silent before it is evicted from the vector clock."""
    lease_ms: int
    """Default 3000. How long an aggregator may be silent before it loses its shards."""
    durability: str
    """Default "memory". What an acknowledgement means: memory, that the server has the contribution; replicated, that
    all its replicas have it too, so that a failover of one server at a time loses nothing; replicated:N, the same where
    each server has N replicas."""
    min_workers: int
    """Default 0. The job pauses while it has fewer workers than this; workers that have finished count too."""
    units: int
    """Default 0. How many units of data are handed out to the workers, each to be counted once; --data units sets it,
    to one for each push."""
    units_per_round: int
    """Default 0. Makes each version of a whole round of so many units, whoever computes them: the result then depends
    neither on how many workers there are nor on which."""
    units_per_epoch: int
    """Default 0. How many of the units are an epoch, whose last round may be shorter; a task's epochs set it."""
    samples: int
    """Default 0. How many samples an epoch of a script has."""
    backup_after: float
    """Default 3.0. With units_per_round: a unit that is out for longer than so many times the median of its round is
    handed out a second time when no other is free, and the first push counts."""
    seed: int
    """Default 0. Decides the initial parameters and the order of the samples."""
    batch_size: int
    """Default 0. How many samples make one gradient."""
    epochs: int
    """Default 0. How many passes over the data."""
