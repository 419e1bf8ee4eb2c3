"""Settings, options and commands that kvps no longer has. Whoever still gives one is told what takes its place."""

from __future__ import annotations

GONE = {
    "kvps simulate": "python -m kvps_simulate in a clone of kvps",
    "task": "give it to Store.create_job, beside the settings",
    "rounds": "give it to create_job, beside the settings",
    "procs": "it is a task's own: kvps up --procs N, or give it to Store.create_job, beside the settings",
    "launched_by": "kvps up and kvps run note it themselves",
    "memory": "kvps notes it itself",
    "topology": "give the settings that the name stood for, as docs/other-systems.md lists them; bsp is --staleness 0 "
    "--data static",
    "max_pending": "kvps chooses it: 1 in BSP, N + 1 in SSP, 2 in ASP, and the units of all open rounds",
    "delay_compensation": "a stale gradient counts for less with staleness_scaling (--staleness-scaling inverse)",
    "delay_versions": "it went with delay_compensation",
    "partition": "a loop, or a task in its data(rank, workers), asks kvps.partition() for the rows of a worker",
    "push_every": "the mean gradient of N batches is that of a batch N times as large: choose a larger batch_size",
    "mirror_every": "an aggregator gives Redis the weights once a second, when it ends, and with each checkpoint",
    "round_ms": "in a job of units (samples or units, --data units) a fast worker does more of them",
    "round_time": "with --data units a fast worker does more units",
    "inner_optimizer": "a script takes local steps: kvps.torch.Optimizer(..., inner=adamw, local_steps=50)",
    "spans": "workers and aggregators always record how long their phases take",
}
"""Name of a setting, as in Python, or of a command, as it was typed -> what to do instead."""

OF_SCRIPTS = dict.fromkeys(
    ("local_steps", "fragments"), "a script says it: kvps.torch.Optimizer(..., inner=adamw, local_steps=50)"
)
"""Name of a setting that no longer has an option -> what to do instead."""

UNUSED = {
    "delay_compensation": "0",
    "delay_versions": "0",
    "partition": "task",
    "push_every": "1",
    "round_ms": "0",
    "inner_optimizer": '{"kind": "sgd", "lr": 0.1, "maximize": false, "momentum": 0.0, "nesterov": false, '
    '"weight_decay": 0.0, "dampening": 0.0}',
}
"""Name of a setting -> its text in the config hash of a job that did not use it. Such a job goes on."""
