"""Per-token streams that only tests declare."""

from collections.abc import Iterator
from contextlib import contextmanager

from megarl.queue.streams import STREAMS, Stream

WEIGHT = Stream("test_weight", "A weight of each token, made up by the tests.", fill=1.0)
# One stream of each dtype, each with a fill value that differs from the dtype's zero.
EVERY_DTYPE = (
    WEIGHT,
    Stream("test_expert", "The number of an expert, larger than float32 can hold.", dtype="int64", fill=-(2**40) - 1),
    Stream("test_flag", "A flag of each token.", dtype="bool", fill=1),
)


@contextmanager
def declared(*streams: Stream) -> Iterator[None]:
    """Declare streams (`WEIGHT` by default) inside the block only, because other tests' queues do not have them."""
    streams = streams or (WEIGHT,)
    for stream in streams:
        STREAMS.declare(stream)
    try:
        yield
    finally:
        for stream in streams:
            del STREAMS._streams[stream.name]
