"""One Ray access token for the tests of this folder, set before any of them imports Ray."""

from tests.support.pool import ray_token as _token  # noqa: F401
