"""The transport of the tests of weight sync: gloo, or that of MEGARL_TEST_TRANSPORT (`make nightly-shared`: relay)."""

from __future__ import annotations

import os

TRANSPORT = os.environ.get("MEGARL_TEST_TRANSPORT", "gloo")
