"""Commands that show a job: its state, its log, its figures."""
