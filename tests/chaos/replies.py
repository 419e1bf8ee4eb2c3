"""A proxy between children and Redis loses, cuts and delays the replies of push and commit."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from helpers.servers import free_port

from chaos.arena import MODES, Arena
from chaos.report import Result

TIMEOUT_S = 1.5  # longer than any wait on the stream `turns`


def replies_are_lost(
    arena: Arena, faults: int = 2000, one_in: int = 12, units: int = 3000, mutants: tuple[str, ...] = ()
) -> Result:
    """Inject a fault into one in `one_in` replies of push or commit, `faults` in all; every other job has units."""
    result = Result("replies", "the reply of a push or commit lost", arena.seed, needed=faults)
    counted: Counter[str] = Counter()
    with arena.server() as store:
        number = 0
        while counted.total() < faults:
            mode = list(MODES)[number % len(MODES)]
            job = arena.job(
                store, staleness=MODES[mode], units=units * (number % 2), worker_timeout_ms=20_000, lease_ms=4_000
            )
            port = free_port()
            url = f"redis://127.0.0.1:{port}?socket_timeout={TIMEOUT_S}"
            with arena.crew(job, result, url=url, mutants=mutants) as crew:
                notes = arena.folder / f"{job.name}.faults"
                proxy, _ = arena.processes.fork(
                    {
                        "role": "proxy",
                        "listen": port,
                        "target": store.url.removeprefix("unix://"),
                        "one_in": one_in,
                        "timeout_s": TIMEOUT_S,
                        "notes": str(notes),
                        "mutants": mutants,
                        "seed": arena.random.getrandbits(32),
                    }
                )
                try:
                    crew.start_all(3, 2, rounds=units // 3)
                    crew.run()
                finally:
                    arena.processes.kill(proxy)
                with suppress(FileNotFoundError):
                    found = Counter(notes.read_text().splitlines())
                    counted += found
                    result.faults = dict(sorted(counted.items()))
            number += 1
            arena.say(f"{mode}: {counted.total()} faults, {result.verdict.contributions} contributions")
            if mutants and result.verdict.problems:
                break
    return result.close()


def scripts_are_flushed(arena: Arena, seconds: float = 30.0, every_s: float = 0.1) -> Result:
    """Make the server forget its scripts again and again."""
    result = Result("flush", "SCRIPT FLUSH", arena.seed, needed=int(seconds / every_s * 0.8))
    with arena.server() as store:
        for mode, staleness in MODES.items():
            job = arena.job(store, staleness=staleness)
            flushed = 0
            with arena.crew(job, result) as crew:
                crew.start_all(3, 2)
                while flushed < seconds / len(MODES) / every_s:
                    crew.wait(every_s)
                    store.client.call("SCRIPT FLUSH")
                    flushed += 1
            result.faults[mode] = flushed
            arena.say(f"{mode}: {flushed} times, {result.verdict.contributions} contributions")
    return result.close()
