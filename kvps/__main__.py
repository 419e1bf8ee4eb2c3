"""``python -m kvps`` is ``kvps``."""

from kvps.cli import main

main()
