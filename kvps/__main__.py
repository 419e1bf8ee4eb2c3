"""Run the command ``kvps`` as ``python -m kvps``."""

from kvps.cli import main

main()
