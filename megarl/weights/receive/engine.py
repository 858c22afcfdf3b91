"""vLLM's weight-transfer backend `megarl`, which receives the weights; one instance in every engine worker.

One start/update/finish session is one whole sync: `update_weights` receives all buckets of the plan. After a failure
of this worker's own the model is partly loaded, although vLLM reports no error, and the replica must be restarted.

If another member fails, `update_weights` returns normally, and the leader finds the failure in the report. It must not
raise: after an exception vLLM's executor leaves the answers of the engine's other workers unread, and takes them for
answers to later calls (vLLM 0.32, v1/executor/multiproc_executor.py). `update_weights` with ABANDON and
`finish_weight_update` then end the session. The weights are of two versions until a later session has brought all of
them. The caller must not let the engine generate before that.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megarl.common.errors import ConnectionLost, PeerTimeout, SyncAborted, WeightSyncError
from megarl.weights.group.backends import BACKENDS
from megarl.weights.group.protocols import ABANDON
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import Group, GroupMembers
from megarl.weights.plan.buckets import unpack_manifest
from megarl.weights.receive.loaders import ModelLoader, prepack_updated_experts
from megarl.weights.receive.receiver import Receiver

logger = logging.getLogger(__name__)


@dataclass
class MegarlInitInfo(WeightTransferInitInfo):
    """The arguments of `init_transfer_engine`, sent once per generation of the group."""

    host: str
    port: int
    key: str = field(repr=False)  # of the store, hexadecimal
    members: str  # GroupMembers.to_json()
    replica: int  # its index in the members
    manifest: str  # buckets.pack_manifest()
    plan_hash: str
    timeout_s: float


@dataclass
class MegarlUpdateInfo(WeightTransferUpdateInfo):
    """The arguments of one sync, which follows the plan in `MegarlInitInfo` with this `layer_span`."""

    sync: int
    version: int
    layer_span: int | None
    plan_hash: str
    timeout_s: float
    slept: bool = False  # the engine has lost all weights since its last sync
    left_out: tuple[str, ...] = ()  # tensors of the plan that do not come again


class MegarlWeightTransferEngine(WeightTransferEngine[MegarlInitInfo, MegarlUpdateInfo]):
    """Receives weight syncs in one engine worker."""

    init_info_cls = MegarlInitInfo
    update_info_cls = MegarlUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.device.type == "cpu":
            prepack_updated_experts()
        read = self.vllm_config.load_config.load_format != "dummy"
        self.loader = ModelLoader(self.model, self.model_config, self.device, read_at_start=read)
        self._receiver: Receiver | None = None
        self._needs_restart: str | None = None  # the failure that left the model partly loaded
        self._loads = False  # this sync has begun to change the model
        self._interrupted: str | None = None  # the failure of another member, after which buckets are missing

    def init_transfer_engine(self, init_info: MegarlInitInfo) -> None:
        """Join the group. vLLM calls this again for every new generation.

        Raises:
            ValueError: the rebuilt plan differs from the sender's.
            WeightSyncError: not all members joined before the deadline, or a failed sync left this worker between start
                and finish.
        """
        self._refuse_if_broken()
        plan = unpack_manifest(init_info.manifest, init_info.plan_hash)
        self.shutdown()
        members = GroupMembers.from_json(init_info.members)
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = SyncStore(init_info.host, init_info.port, bytes.fromhex(init_info.key))
        group = Group(store, members, members.offset(init_info.replica) + worker)
        group.join(init_info.timeout_s, loads_in_place=self.loader.check() is None)
        device = self.device if BACKENDS[members.backend].device == "cuda" else torch.device("cpu")
        self._receiver = Receiver(group, plan, self.loader, device)
        self.loader.check_next_sync()

    def start_weight_update(self) -> None:
        """Begin a session. Raises WeightSyncError if an earlier sync left the model partly loaded."""
        self._refuse_if_broken()
        self._loads, self._interrupted = False, None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, check and load all buckets, or with ABANDON give up the session.

        The base class's method would also synchronise an accelerator on CPU.
        """
        if update_info == ABANDON:
            self.abandon()
            return
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MegarlUpdateInfo) -> None:
        """Receive one sync, or as much of it as comes before another member fails.

        Every failure is reported to the other members; one of this worker's own is then raised.
        """
        if self._receiver is None:
            raise WeightSyncError("update_weights was called before init_weight_transfer_engine")
        self._loads = True
        if update_info.slept:
            self.loader.check_next_sync()
            self._receiver.has_all = False
        with self._breaks_model():
            try:
                self.loader.start()
                self._receiver.receive(
                    update_info.sync,
                    update_info.version,
                    update_info.timeout_s,
                    layer_span=update_info.layer_span,
                    plan_hash=update_info.plan_hash,
                    left_out=update_info.left_out,
                )
            except (SyncAborted, ConnectionLost, PeerTimeout) as error:
                self._interrupted = str(error)
                logger.warning("not all weights of version %d arrived: %s", update_info.version, error)

    def abandon(self) -> None:
        """Abandon the session, whose weights did not all arrive: `finish_weight_update` then ends it without effect.

        Raises WeightSyncError if the model cannot be loaded again.
        """
        self._refuse_if_broken()
        if self._loads:
            with self._breaks_model():
                self.loader.abandon()
        self._loads, self._interrupted = False, None

    def finish_weight_update(self) -> None:
        """Complete the new weights, if the model got them. Raises WeightSyncError if some are missing."""
        self._refuse_if_broken()
        if self._interrupted is not None:
            raise WeightSyncError(f"not all weights arrived, so they cannot be completed: {self._interrupted}")
        if self._loads:
            with self._breaks_model():
                self.loader.finish()

    def shutdown(self) -> None:
        """Leave the group. The model keeps its weights."""
        if self._receiver is not None:
            self._receiver.group.close()
            self._receiver = None

    @contextmanager
    def _breaks_model(self) -> Iterator[None]:
        """Record that an exception in the block leaves the model partly loaded."""
        try:
            yield
        except BaseException as error:
            self._needs_restart = str(error) or repr(error)
            raise

    def _refuse_if_broken(self) -> None:
        if self._needs_restart is not None:
            raise WeightSyncError(
                "this replica was left in the middle of a failed weight sync and must be restarted: "
                f"{self._needs_restart}"
            )
