"""``python -m kvps_bench``."""

from kvps_cli import main

from kvps_bench.cli import app

main(app)
