"""Proves a commit log: one chain, and the same weights again bit for bit."""
