"""`kvps timeline`: what every worker and every shard did, and when, as a trace for a viewer or as a figure."""
