"""`kvps top`: a job on a terminal, as it is now. `rows` and `figures` make text and need no library; `app` draws it."""
