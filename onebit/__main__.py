"""`python -m onebit`: the command `onebit`, for where it is not on the path."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
