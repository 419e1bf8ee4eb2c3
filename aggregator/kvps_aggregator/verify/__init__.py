"""Proves a commit log: it is one chain, and a replay gives the same weights bit for bit."""
