"""Float32 arrays and the form in which they are sent. Pure: no Redis, no files."""
