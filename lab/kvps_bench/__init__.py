"""Benchmarks that a user can repeat: kvps and what it is compared with, in turns, within one run.

Machines are noisy and shared, so an absolute time says little. Every case takes its turn again and again in the same
run, on the same server. The results are medians, spreads, and ratios turn by turn.
"""
