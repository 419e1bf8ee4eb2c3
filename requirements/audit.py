"""Asks PyPI for known vulnerabilities of the packages that lock files name. Run by `make audit`.

It fails if there is one, and also if not every package could be asked for: no answer is no good news.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_ASK = ("-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "-r")


def main(lock: str) -> int:
    """Print one line for each vulnerability, and one for the lock. Returns the exit status."""
    done = subprocess.run([sys.executable, *_ASK, lock], capture_output=True, text=True)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        print(f"{lock} is not audited: {(done.stderr.strip().splitlines() or ['pip-audit printed nothing'])[-1]}")
        return 2
    if unasked := [each["name"] for each in found if "skip_reason" in each]:
        print(f"{lock} is not audited: there is no answer for {len(unasked)} of {len(found)} packages")
        return 2
    for each in found:
        for known in each["vulns"]:
            fixed = ", ".join(known["fix_versions"]) or "no version"
            print(f"{each['name']} {each['version']}: {known['id']}, fixed in {fixed}")
    vulnerable = sum(bool(each["vulns"]) for each in found)
    print(f"{vulnerable} of {len(found)} packages of {lock} are vulnerable")
    return 1 if vulnerable else 0


if __name__ == "__main__":
    sys.exit(max(map(main, sys.argv[1:])))
