"""Ctrl-C and SIGTERM of a command that has something to tear down: the first one ends its work, none the tear-down."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

CTRL_C = (signal.SIGINT,)
ANY_STOP = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupted_once(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at the first of `signals`, and ignore all that follow until its end.

    So the block can tear down what it has started, which must have a bound. Only the main thread may call it. Sets
    SIGINT also where a shell has it ignored, as in processes that it starts in the background.
    """
    before = {number: signal.getsignal(number) for number in signals}

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in signals:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
