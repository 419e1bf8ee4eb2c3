"""Hostile input: whoever may write to the server or to a file changes what a job holds, and every reader is run on it.

`python -m hostile` (make fuzz) runs many mutations; `test_hostile.py` runs a few of them. A mutation is made from the
seed and its number alone, so `--only NUMBER` makes it again.
"""
