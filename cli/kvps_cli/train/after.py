"""What is said after a run: where its weights are, for how long, and how to look at it."""

from __future__ import annotations

from kvps_aggregator.checkpoints import Checkpoints

from kvps.history.checkpoint_directory import holds
from kvps.store import Store
from kvps_cli import connect, finished_runs
from kvps_cli.output import seconds_text


def is_saved(store: Store, job: str, saving: Checkpoints) -> bool:
    """Return whether a job's last version is in a file, as it is unless writing failed."""
    state = store.job(job).state()
    return holds(saving.directory, job, state.id, state.version)


def what_stays(store: Store, job: str, saving: Checkpoints | None) -> str:
    """Return the line that says where a job's weights are after the command, and how to look at them; "" if they end
    with the server."""
    look = f"kvps log {job}, kvps timeline {job} -o run.svg, kvps inspect {job}"
    stays = store.ends_unused and store.stays_s and finished_runs.may_stay(store)
    time = seconds_text(store.stays_s)
    lost = ""
    if saving and is_saved(store, job, saving):
        files = f"the weights are in {saving.directory}: kvps checkpoint ls {saving.directory}"
        return f"{files}; the log stays for {time}: {look}" if stays else files
    if saving:
        lost = f"the last version is in no file of {saving.directory}; "
    if stays:
        return f"{lost}the weights and the log stay for {time}: {look}"
    return "" if store.ends_server else f"{lost}the weights are on the server, in job {job}: kvps checkpoint save {job}"


def where_weights_are(store: Store, job: str, saving: Checkpoints | None, server: connect.ServerOptions) -> str:
    """Return that line, or how to keep weights that end with the server."""
    if stays := what_stays(store, job, saving):
        return stays
    if server.data_dir:
        return f"the weights are in {server.data_dir}, in job {job}: kvps server start --data-dir {server.data_dir}"
    return (
        "the weights are gone with the private server: --checkpoint-every N keeps them in files, and --server-stays "
        "SECONDS the server running"
    )
