"""The process that computes: device, training loop, tasks."""

from kvps_workers.task import Task, load_task

__all__ = ["Task", "load_task"]
