"""Every decision: keys, scripts, plans, what a job is at one instant. No bytes of arrays."""
