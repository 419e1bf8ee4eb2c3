"""What proves a training: checkpoints, the replay of its log, and faults on purpose."""
