"""`python -m kvplan` is the `kvplan` command."""

import sys

from kvplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
