"""Measurements that a user can repeat: kvps beside what it is held against, in turns, within one run.

Machines are noisy and shared, and an absolute time says little. So every case takes its turn again and again in the
same run, on the same server, and what is reported are medians, spreads, and ratios turn by turn.
"""
