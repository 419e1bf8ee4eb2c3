"""Simulate one job: `python -m kvps_simulate --workers 8 --nodes 4 --size 100e6 --bandwidth 25e9 --compute-s 0`."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import fields

from kvps_simulate.job import Job
from kvps_simulate.settings import Constants, Setting


def main() -> None:
    parser = argparse.ArgumentParser(description=Setting.__doc__)
    for f in fields(Setting):
        kind = {"action": "store_true"} if f.name == "local" else {"type": type(f.default), "default": f.default}
        parser.add_argument("--" + f.name.replace("_", "-"), **kind)
    job = Job(Setting(**vars(parser.parse_args())), Constants.load()).run()
    print(f"a round takes {1000 * statistics.median(seconds for each in job.rounds for seconds in each):.4g} ms")
    members = {"worker": job.setting.workers, "aggregator": job.setting.nodes}  # of parts that each has for itself
    busy = {name: seconds / members.get(name.split()[0], 1) / job.env.now for name, seconds in job.net.busy.items()}
    for name in sorted(busy, key=busy.__getitem__, reverse=True)[:5]:
        print(f"{name}: busy for {busy[name]:.1%} of the time")


if __name__ == "__main__":
    main()
