"""Metrics of the jobs of a server, for Prometheus: `totals` counts, `job_reader` reads Redis, `server` answers."""
