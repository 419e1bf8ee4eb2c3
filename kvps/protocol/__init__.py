"""Every decision of the protocol: keys, scripts, plans, a job's state at one instant. No bytes of arrays."""
