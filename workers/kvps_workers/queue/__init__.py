"""Tasks from an RQ queue, each in a process of its own."""
