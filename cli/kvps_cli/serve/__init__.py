"""Commands for the server and its jobs: start it, check it, let users in, remove jobs."""
