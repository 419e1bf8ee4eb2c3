"""The ACL rules of each role: which keys of one job, and which commands, a user of that role has. Pure.

A script runs with the rights of the user that calls it, so a role that may run a script needs each command in it. That
is why scripts are no boundary: docs/security.md says what that means.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvps.errors import InvalidName
from kvps.protocol.keys import JOBS, MEMORY, bytes_keys, check_name, control_keys
from kvps.protocol.scripts import SCRIPTS

READ_ONLY_KEYS = (7, 0)
"""The first version of Redis with keys that a user may only read (%R~)."""
_QUEUE = "rq:*"  # RQ's own keys, which only `kvps_workers.queue` knows one by one
_QUEUE_COMMANDS = (
    *("BLMOVE", "DEL", "EXISTS", "EXPIRE", "HDEL", "HGET", "HSET", "HSTRLEN", "LINDEX", "LINSERT", "LPOP", "LRANGE"),
    *("LREM", "RPUSH", "SADD", "SMEMBERS", "SREM", "TIME", "TYPE", "UNLINK", "ZADD", "ZRANGE", "ZREM"),
    *("ZREMRANGEBYSCORE", "ZREVRANGE"),
)
_CONNECT = (
    *("CLIENT|SETNAME", "CLUSTER|SLOTS", "ASKING", "READONLY", "PING", "SELECT", "INFO", "TIME", "MULTI", "EXEC"),
    "DISCARD",
)
# What kvps itself reads with, and people who look with redis-cli.
_READ = (
    *("EXISTS", "GET", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "MGET", "SCARD", "SISMEMBER", "SMEMBERS", "STRLEN"),
    *("TTL", "TYPE", "XLEN", "XRANGE", "XREAD", "XREVRANGE", "ZCARD", "ZCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZSCORE"),
)
_ALL_KEYS = "*"
_NEVER = "never:*"  # a script declares its keys for reading and writing, and so a user of it may write here


@dataclass(frozen=True)
class Role:
    """What one role may do.

    scripts   the scripts that it may run, and so the commands in them
    commands  the other commands, besides those to connect and to read
    writes    the control keys that it may write, or `_ALL_KEYS` of the job
    bytes     the kinds of bytes that it may write: g (gradients), r (residuals), x (items of experience)
    loads     whether it may load scripts
    lists     the keys of all jobs that it may write
    queues    whether it may use the queue
    """

    scripts: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    bytes: tuple[str, ...] = ()
    loads: bool = False
    lists: tuple[str, ...] = ()
    queues: bool = False


_READER = Role(scripts=("pin",), writes=("pin", _NEVER))
_EVALUATOR = Role(scripts=("pin", "report"), writes=("pin", "evaluation", "evaluations", _NEVER))
_WORKER = Role(
    scripts=("join", "push", "heartbeat", "leave", "next_unit", "reserve", "control", "pin", "report", "sync"),
    commands=("SET", "UNLINK", "WAIT"),
    writes=(
        *("version", "config", "clock", "workers", "skip", "ranks", "rounds", "pushed", "draining", "finished"),
        *("turns", "free_units", "taken_units", "heartbeat", "inbox", "units", "plan", "commits", "pin", "sync"),
        *("states", "trace:*", "activity", "evaluation", "evaluations", _NEVER),
    ),
    bytes=("g", "r"),
)
_ACTOR = Role(
    scripts=("enter", "quit", "prompt", "offer", "put", "pin", "sync"),
    commands=("SET", "UNLINK", "WAIT"),
    writes=(
        *("version", "config", "rollouts", "items", "lots", "waiting_lots", "lot_bases", "taken_lots", "actors"),
        *("actor_beats", "bases", "units", "free_units", "taken_units", "turns", "news", "pin", "sync", _NEVER),
    ),
    bytes=("x",),
)
_AGGREGATOR = Role(
    scripts=(
        *("plan", "norm", "ready", "reject", "acquire", "renew", "own", "free", "evict", "recover", "mirror"),
        *("rollback", "trace", "trim", "pin", "sync"),
    ),
    commands=("SET", "SETRANGE", "UNLINK", "SCAN", "WAIT", "BGREWRITEAOF"),
    writes=(_ALL_KEYS,),
    loads=True,
)
ROLES = {
    "reader": _READER,
    "evaluator": _EVALUATOR,
    "worker": _WORKER,
    "actor": _ACTOR,
    "aggregator": _AGGREGATOR,
    "learner": Role(
        scripts=(
            *("create", "publish", "plan", "ready", "acquire", "renew", "own", "free", "evict", "recover"),
            *("rollback", "trace", "trim", "control", "pin", "sync", "claim", "take", "settle"),
        ),
        commands=(*_AGGREGATOR.commands, "CLUSTER|NODES"),
        writes=(_ALL_KEYS,),
        loads=True,
        lists=(JOBS,),
    ),
    "host": Role(
        scripts=(*_WORKER.scripts, "evict"),
        commands=_WORKER.commands,
        writes=_WORKER.writes,
        bytes=_WORKER.bytes,
        loads=True,
        queues=True,
    ),
    "submitter": Role(
        scripts=("create", "sync"),
        commands=("SET", "UNLINK", "WAIT", "CLUSTER|NODES"),
        writes=(_ALL_KEYS,),
        loads=True,
        lists=(JOBS, MEMORY),
        queues=True,
    ),
    "operator": Role(
        scripts=tuple(SCRIPTS),
        commands=(*_AGGREGATOR.commands, "CLUSTER|NODES"),
        writes=(_ALL_KEYS,),
        loads=True,
        lists=(JOBS, MEMORY),
        queues=True,
    ),
}


def rules(role: str, job: str, version: tuple[int, int] = READ_ONLY_KEYS) -> list[str]:
    """Return the rules of ACL SETUSER, without a password, for a role in a job.

    `job` is a name, or a prefix and `*` for all jobs whose names begin so; `version` is that of Redis, (7, 0), or of
    the Redis whose commands a Valkey has. Before 7.0, Redis has no keys that may only be read: a worker may then write
    every key of its job, and a reader may run no script. Raises InvalidName.
    """
    check_jobs(job)
    may, old = ROLES[role], version < READ_ONLY_KEYS
    scripts = () if old and role == "reader" else may.scripts
    commands = {*_CONNECT, *_READ, *may.commands}
    if scripts:
        commands |= {"EVALSHA", *(command for name in scripts for command in SCRIPTS[name].commands)}
    if may.loads:
        commands.add("SCRIPT|LOAD")
    if may.queues:
        commands |= set(_QUEUE_COMMANDS)
    keys = [*_keys(job, may, old), *(["~" + _QUEUE] if may.queues else [])]
    return ["reset", "on", *keys, "-@all", *sorted(f"+{command.lower()}" for command in commands)]


def check_jobs(job: str) -> None:
    """Raise InvalidName unless `job` is the name of a job, or a prefix of names and `*`."""
    if job != "*":
        try:
            check_name("job", job.removesuffix("*"))
        except InvalidName as error:
            raise InvalidName(f"{error}; with a * at the end for all jobs whose names begin so") from None


def _keys(jobs: str, may: Role, old: bool) -> list[str]:
    everything = [control_keys(jobs), bytes_keys(jobs)]
    if _ALL_KEYS in may.writes:
        written, read = everything, []
    else:
        written = [control_keys(jobs, what) for what in may.writes]
        written += [bytes_keys(jobs, f"{kind}:*") for kind in may.bytes]
        read = everything
    if may.lists:
        written = [*written, *may.lists]
    elif jobs.endswith("*"):
        read = [*read, JOBS]
    if old:
        return [f"~{key}" for key in dict.fromkeys([*read, *written])]
    return [*(f"~{key}" for key in written), *(f"%R~{key}" for key in read)]
