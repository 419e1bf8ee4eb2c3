"""The proof of the same bits: one job, trained in many ways, ends with one sha256. `make same-bits` runs it.

job        the job, an oracle for its weights in plain NumPy, and the judge of a run
workers    threads that train, come and go, and are slow
ways       the ways in which the job is trained
faults     planted faults, which the judge must catch
"""
