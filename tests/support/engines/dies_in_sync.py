"""An engine worker that is killed in the middle of a weight sync; `worker_extension_cls` has vLLM import it there."""

import os
import signal
from pathlib import Path
from typing import Any

from megarl.weights.receive.engine import MegarlWeightTransferEngine
from megarl.weights.receive.loaders import ModelLoader

MARK = "MEGARL_TEST_DIES_IN_SYNC"  # a file that says it has happened; in FILE.syncs every sync leaves a line
VERSION = 2
_receive, _load = MegarlWeightTransferEngine.receive_weights, ModelLoader.load
_about_to_die = False


class DiesInSync:
    """Replica 1's worker, once, when the first tensors of version 2 have been loaded."""


def receive_weights(self: MegarlWeightTransferEngine, update_info: Any) -> None:
    global _about_to_die
    assert self._receiver is not None
    with Path(f"{os.environ[MARK]}.syncs").open("a") as syncs:
        syncs.write(f"{os.getpid()} {update_info.version} {self._receiver.group.name}\n")
    chosen = "replica 1" in self._receiver.group.name and update_info.version == VERSION
    _about_to_die = chosen and not Path(os.environ[MARK]).exists()
    _receive(self, update_info)


def load(self: ModelLoader, tensors: Any) -> None:
    _load(self, tensors)
    if _about_to_die:
        Path(os.environ[MARK]).touch()
        os.kill(os.getpid(), signal.SIGKILL)


MegarlWeightTransferEngine.receive_weights = receive_weights  # type: ignore[method-assign]
ModelLoader.load = load  # type: ignore[method-assign]
