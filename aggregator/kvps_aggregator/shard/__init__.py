"""One shard, and its holder's work on it."""
