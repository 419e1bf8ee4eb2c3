"""The chaos suite: kvps under every fault that can be injected on one machine, judged from outside.

    processes  workers, aggregators and proxies, forked on demand, so that thousands can be killed
    roles      what such a process does; points: where it is killed; mutants: which check is taken out of it
    crew       the children of one job, started again when they die
    verdict    what the commit log, the workers' files and the keys say at the end
    proxy      a TCP proxy that cuts, delays, resets and swallows
    report     results as a table, as JSON and as docs/reliability.md

Every other module is a family of scenarios. `python -m chaos` runs them, `test_chaos.py` their short form.
"""
