"""``python -m kvps_bench``."""

from kvps.cli import main
from kvps_bench.cli import app

main(app)
