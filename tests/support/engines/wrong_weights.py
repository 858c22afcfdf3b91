"""An engine worker that loads other weights than it has received; `worker_extension_cls` has vLLM import it there.

What it receives is right, and so are its digests: nothing in the weight sync can tell.
"""

import os
from pathlib import Path
from typing import Any

from megarl.weights.receive.engine import MegarlWeightTransferEngine
from megarl.weights.receive.loaders import ModelLoader

MARK = "MEGARL_TEST_WRONG_WEIGHTS"  # a file that says it has happened
REPLICA = "MEGARL_TEST_WRONG_REPLICA"  # index of the replica; 1 if it is not set
VERSION = 2
_receive, _load = MegarlWeightTransferEngine.receive_weights, ModelLoader.load
_wrong = False


class LoadsWrongWeights:
    """The worker of one replica, once, in the sync of version 2: the MLPs' outputs have another sign."""


def receive_weights(self: MegarlWeightTransferEngine, update_info: Any) -> None:
    global _wrong
    assert self._receiver is not None
    chosen = f"replica {os.environ.get(REPLICA, '1')}" in self._receiver.group.name and update_info.version == VERSION
    _wrong = chosen and not Path(os.environ[MARK]).exists()
    _receive(self, update_info)
    if _wrong:
        Path(os.environ[MARK]).touch()


def load(self: ModelLoader, tensors: Any) -> None:
    if _wrong:
        tensors = [(name, -tensor if "mlp.down_proj" in name else tensor) for name, tensor in tensors]
    _load(self, tensors)


MegarlWeightTransferEngine.receive_weights = receive_weights  # type: ignore[method-assign]
ModelLoader.load = load  # type: ignore[method-assign]
