"""Run the command ``kvps`` as ``python -m kvps``."""

from importlib import import_module

import_module("kvps_cli").main()  # by its name: the library imports no package above it
