"""`python -m onebit`: the command `onebit`, if it is not on the path."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
