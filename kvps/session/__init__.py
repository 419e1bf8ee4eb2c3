"""A worker's side of a job."""
