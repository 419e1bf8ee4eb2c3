"""Weights out of a job: a learner that publishes its versions, and processes that watch them."""
