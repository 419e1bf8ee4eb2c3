"""The proof of the same bits: two jobs, trained in many ways, end with one sha256 each. `make same-bits` runs it.

job        what the jobs share, the digits with an oracle in plain NumPy, and the judge of a run
workers    the digits' workers on threads, which train, come and go, and are slow
cnn        a CNN with dropout through `worker.batches`, with an oracle in plain PyTorch
ways       the ways in which the jobs are trained
commands   the same under `kvps run` (by script) and `kvps up`
faults     planted faults, which the judge must catch
"""
