"""The arithmetic of one version. Pure: the aggregator and verify share it."""
