"""This computer: processes, forks, paths."""
