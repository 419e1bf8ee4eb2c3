"""The user's own private Redis server."""
