"""A child process that does at its start what its setup says."""

import os
import pickle
import time

from megarl.common.process.child_program import ChildProgram, json_bytes


def main() -> None:
    """Report, or do not."""
    program = ChildProgram()
    how = program.receive().decode()
    if how == "die":
        os._exit(5)
    if how == "hang":
        time.sleep(1000)
    if how == "flood":
        program.connection.sendall(b"x" * 100)
        time.sleep(1000)
    if how == "fork":
        os.fork()
    sent = {"pickle": pickle.dumps({"pid": 1}), "list": b"[]", "problem": json_bytes({"problem": "not here"})}
    program.send(sent.get(how, json_bytes({"pid": os.getpid(), "text": "\ud800"})))
    program.receive()


if __name__ == "__main__":
    main()
