"""One shard in the hands of its holder."""
