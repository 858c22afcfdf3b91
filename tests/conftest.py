"""Shared, expensive things: worlds of ranks (one per size, kept for the whole session)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch looks up the name of the address of each connection to a store: 10 s each where no name server answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import hypothesis
import pytest

from tests.support.world import Starter, World

# Deadlines of single examples would fail at random on a busy machine.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(2)` is the session's world of two ranks; one that died is started anew."""
    starter = Starter()
    worlds: dict[int, World] = {}

    def get(size: int) -> World:
        if size not in worlds or not worlds[size].alive:
            worlds[size] = World(size, starter)
        return worlds[size]

    yield get
    for each in worlds.values():
        each.close()
    starter.close()
