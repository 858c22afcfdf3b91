"""`python -m megarl`: the `megarl` command where its script is not on the PATH, or under `torchrun -m megarl`."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
