"""Hostile input: whoever may write to the server or to a file changes what a job holds, and every reader is run on it.

`python -m hostile` (make fuzz) runs many mutations; `test_hostile.py` runs a few of them. A mutation is made from the
seed and its number alone, so `--only NUMBER` makes it again.

`python -m hostile.roles` tries what each role can do with its password, and `python -m hostile.beside` how much the
clients of one job slow other jobs down.
"""
