"""`python -m tinyds41`: the same as the `tinyds41` command."""

import sys

from tinyds41.cli import main

if __name__ == "__main__":
    sys.exit(main())
