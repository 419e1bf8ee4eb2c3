"""Arrays of float32, and what is sent of them. Pure: no Redis, no files."""
