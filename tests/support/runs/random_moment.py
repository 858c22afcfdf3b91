"""The moments at which tests let a part of a run die: drawn by a seed that is printed, and can be given."""

from __future__ import annotations

import os
import random

from tests.support.runs.fault_table import SEED_VARIABLE


def moments() -> random.Random:
    """Return what moments are drawn from; its seed is printed as the variable that repeats them."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(10**6))
    print(f"{SEED_VARIABLE}={seed}")
    return random.Random(f"moments-{seed}")
