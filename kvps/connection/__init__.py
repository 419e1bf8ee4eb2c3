"""Connections to Redis."""
