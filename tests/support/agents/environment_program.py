"""A stand-in for the program of an environment server: it answers, starts a child, and ends when it is asked to.

A run is answered by one trace, whose metrics tell the process, its child and its variables. The model `die` ends it.
"""

import json
import os
import subprocess
import sys

import msgpack
import zmq


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    if asked["environment"]["taskset"]["id"] == "broken":
        sys.exit("the taskset cannot be imported")
    child = subprocess.Popen(["sleep", "600"])
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(asked["address"])
    while True:
        client, name, method, content = socket.recv_multipart()
        answer: dict = {"success": True}
        if method == b"run":
            if msgpack.unpackb(content)["model"] == "die":
                os._exit(7)
            info = {"pid": os.getpid(), "child": child.pid, "variables": dict(os.environ)}
            delta = {"trace": "t", "open": {"id": "t"}, "set": {"ok": True, "info": info}}
            socket.send_multipart([client, name, b"delta", msgpack.packb(delta)])
            answer["traces"] = [{"id": "t", "nodes": 0, "calls": 0}]
        socket.send_multipart([client, name, b"reply", msgpack.packb(answer)])


main()
