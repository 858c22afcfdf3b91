"""Python's garbage collection in processes that live as long as a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Requests and groups in flight are many objects that stay for long: after every 700 new ones, Python's default, they
# would be visited again and again, which took a third of the controller's time with 10,000 trajectories in flight.
_YOUNG_OBJECTS = 50_000
_FEW_OBJECTS, _NEVER = 500, 1_000_000_000
_PYTHONS_OWN = gc.get_threshold()


def begin_start() -> None:
    """Make collections rare while a process starts. `end_start`, or what sets how it collects later, ends that.

    Imports make a million objects that all stay; Python's own thresholds visit them again and again meanwhile.
    """
    gc.set_threshold(_YOUNG_OBJECTS)


def end_start() -> None:
    """Collect as Python does by itself, but not the objects that exist now (see `exempt_present_objects`)."""
    exempt_present_objects()
    gc.set_threshold(*_PYTHONS_OWN)


def exempt_present_objects() -> None:
    """Take all objects that exist now out of later collections. To be called when a process has started.

    They are mostly imported modules, and stay until the end. A collection that visits them stops a process for 0.3 s.
    """
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Make collections rare in a process with many small objects in flight. Not for one whose tensors are in cycles."""
    gc.set_threshold(_YOUNG_OBJECTS)


def collect_young_objects() -> None:
    """Make collections short in a process whose event loop runs thousands of agent loops.

    Every request, response and state of these is a list of hundreds of tokens, each of which a collection visits, in
    memory that is mostly in no cache: one of 5,000 new objects stopped such a process for 0.1 s, one of all objects
    for 0.4 s. Only objects that have just been made are visited here, a few at a time; cycles of older ones stay until
    a call of `gc.collect`. The loops make next to none: less than one object per trajectory.
    """
    gc.set_threshold(_FEW_OBJECTS, _NEVER, _NEVER)


def collect_for_loops(*, shipped: bool) -> None:
    """Choose between both for a process that runs many agent loops.

    `shipped`: only megarl's own loops, which make next to no cycles. What others make, such as clients of HTTP, may be
    in cycles that outlive a collection of young objects, and would stay.
    """
    (collect_young_objects if shipped else collect_rarely)()


@contextmanager
def collections_paused() -> Iterator[None]:
    """Collect nothing meanwhile. For work at a start that takes less time than a visit of all objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
