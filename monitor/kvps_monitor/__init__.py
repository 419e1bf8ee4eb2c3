"""What people look at while a job trains: its live state, timelines, a terminal screen, a page, metrics."""
