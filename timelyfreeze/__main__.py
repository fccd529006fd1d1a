"""Entry point: ``python -m timelyfreeze COMMAND ...``, the same as ``timelyfreeze COMMAND ...``."""

import sys

from timelyfreeze.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
