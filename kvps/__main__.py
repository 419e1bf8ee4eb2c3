"""The command ``kvps``, also as ``python -m kvps``."""

import sys
from importlib import import_module


def main() -> None:
    """Run the command line."""
    try:
        import_module("kvps_cli").main()  # by its name: the library imports no package above it
    except KeyboardInterrupt:  # Ctrl-C while its libraries load: from then on the command line itself takes it
        sys.exit(130)


if __name__ == "__main__":
    main()
