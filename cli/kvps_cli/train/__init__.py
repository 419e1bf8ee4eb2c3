"""Commands that train: up and run, the parts one by one, and the queue."""
