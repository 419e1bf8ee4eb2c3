"""A simulation of jobs that are larger than the machines at hand: docs/simulation.md says what it assumes."""
