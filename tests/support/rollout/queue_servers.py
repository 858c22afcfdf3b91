"""TransferQueue's controller and one storage unit twice in one process: as the library makes them, and locked.

`python -m tests.support.rollout.queue_servers` writes one line of JSON, `{"open": {...}, "locked": {...}}`, each part
with the controller's and the storage unit's id and ports on 127.0.0.1, and serves until its standard input ends.
"""

import json
import os
import sys
from typing import Any

from megarl.queue.socket_auth import lock
from megarl.queue.transfer import quiet_library


def start_servers() -> dict[str, Any]:
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.sampler import SequentialSampler
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    controller = TransferQueueController.__ray_metadata__.modified_class(SequentialSampler(), polling_mode=True)
    storage = SimpleStorageUnit.__ray_metadata__.modified_class({"num_data_storage_units": 1})
    KEPT.extend((controller, storage))
    infos = {"controller": controller.zmq_server_info, "storage": storage.zmq_server_info}
    return {name: {"id": info.id, "ports": info.ports} for name, info in infos.items()}


KEPT: list[Any] = []


def main() -> None:
    quiet_library()
    from transfer_queue import controller
    from transfer_queue.storage import simple_storage

    controller.get_node_ip_address = simple_storage.get_node_ip_address = lambda: "127.0.0.1"
    opened = start_servers()
    lock()
    sys.stdout.write(json.dumps({"open": opened, "locked": start_servers()}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
