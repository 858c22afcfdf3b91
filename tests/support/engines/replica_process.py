"""A FakeReplica that answers calls over a connection: `python -m tests.support.engines.replica_process PORT NAME`."""

import sys
from multiprocessing.connection import Client

from megarl.common.process.processes import die_with_parent
from tests.support.engines.fake_engines import FakeReplica


def main() -> None:
    die_with_parent()
    connection = Client(("127.0.0.1", int(sys.argv[1])), authkey=b"test")
    replica = FakeReplica(sys.argv[2])
    while True:
        method, args = connection.recv()
        try:
            answer = (True, replica.call(method, *args, timeout_s=60.0))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        connection.send(answer)


if __name__ == "__main__":
    main()
