"""What outlasts a version: checkpoints and the commit log."""
