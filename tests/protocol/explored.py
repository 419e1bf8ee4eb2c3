"""Proof by content: what takes minutes and gigabytes to explore is explored again when the model has changed.

    python -m protocol.explored [--procs N]        as `make exhaustive` does

`explored.json` says for each case how many states it has, none of them broken, and of which model that is true. A case
is stale if the model's code, or the case itself, is another one now. Comments and docstrings do not count.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from typing import Any

from helpers.paths import ROOT, TESTS
from protocol.bounds import DEEPEST, LARGE, REDUNDANT, Case
from protocol.model import explore

STAMPS = TESTS / "protocol/explored.json"
_MODEL = (TESTS / "protocol/model.py", TESTS / "protocol/model_scripts.py", ROOT / "kvps/staleness.py")

CASES = LARGE + [Case(*sizes, settings, frozenset({mutant})) for mutant, (_, sizes, settings) in REDUNDANT.items()]


def stamps() -> dict[str, Any]:
    """Return what was explored: the name of a case -> its stamp."""
    return dict(json.loads(STAMPS.read_text())) if STAMPS.exists() else {}


def stale(cases: Iterable[Case]) -> list[Case]:
    """Return the cases that were never explored, or with another model than the one that is here."""
    known = stamps()
    return [case for case in cases if known.get(case.name, {}).get("of") != fingerprint(case)]


def fingerprint(case: Case) -> str:
    """Return what an exploration depends on: the model's code, and the sizes, of which a job's settings give one."""
    sizes = f"{case.name} {case.model.scripts.max_pending}"
    return hashlib.sha256(f"{_code()} {sizes}".encode()).hexdigest()[:16]


@cache
def _code() -> str:
    return " ".join(word for path in _MODEL for word in _words(ast.parse(path.read_text())))


def _words(tree: ast.AST) -> Iterator[str]:
    """Yield the kinds, names and constants of all nodes but docstrings: the same for every Python and every layout."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
        yield type(node).__name__
        yield from (repr(value) for _, value in ast.iter_fields(node) if isinstance(value, str | int | float | bytes))


def _explored(case: Case) -> dict[str, Any]:
    began = time.process_time()
    result = explore(case.model)
    if result.found or not result.complete:
        raise AssertionError(f"{case.name}: {result.found or 'not all states were visited'}")
    return {"of": fingerprint(case), "states": result.states, "seconds": round(time.process_time() - began)}


def main() -> None:
    """Explore what is stale, and write down each case as soon as it is done."""
    parser = argparse.ArgumentParser(description="Explore the model of the commit protocol at large bounds.")
    parser.add_argument("--procs", type=int, default=1, help="processes, of up to some gigabytes each")
    procs = parser.parse_args().procs
    cases = [*CASES, *DEEPEST]
    names = {case.name for case in cases}
    with ProcessPoolExecutor(procs, max_tasks_per_child=1) as pool:
        running = {pool.submit(_explored, case): case for case in stale(cases)}
        print(f"{len(running)} of {len(cases)} cases are stale")
        for done in as_completed(running):
            known = {name: stamp for name, stamp in stamps().items() if name in names}
            known[running[done].name] = stamp = done.result()
            lines = (f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
            STAMPS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            print(f"{running[done].name}: {stamp['states']:,} states, {stamp['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
