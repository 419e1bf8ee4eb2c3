"""Where bytes lie: in Redis, or in memory that processes share."""
