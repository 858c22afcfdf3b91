"""vLLM's weight-transfer backend `megarl`, which receives the weights; one instance in every engine worker.

One start/update/finish session is one whole sync: `update_weights` receives all buckets of the plan. After any failure
here the model is partly loaded, although vLLM reports no error, and the replica must be restarted.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megarl.common.errors import WeightSyncError
from megarl.weights.buckets import unpack_manifest
from megarl.weights.receiver import Receiver
from megarl.weights.store import SyncStore
from megarl.weights.transport import Group, GroupMembers

_M_MMAP_THRESHOLD = -3  # malloc.h
MMAP_DURING_SYNC = 2**20
MMAP_OTHERWISE = 2**25  # the value that glibc's own, dynamic threshold reaches


@dataclass
class MegarlInitInfo(WeightTransferInitInfo):
    """The arguments of `init_transfer_engine`, sent once per generation of the group."""

    host: str
    port: int
    members: str  # GroupMembers.to_json()
    replica: int  # its index in the members
    manifest: str  # buckets.pack_manifest()
    plan_hash: str
    timeout_s: float


@dataclass
class MegarlUpdateInfo(WeightTransferUpdateInfo):
    """The arguments of one sync. `plan_hash` must be that of the plan in `MegarlInitInfo`."""

    sync: int
    version: int
    plan_hash: str
    timeout_s: float


class MegarlWeightTransferEngine(WeightTransferEngine[MegarlInitInfo, MegarlUpdateInfo]):
    """Receives weight syncs in one engine worker."""

    init_info_cls = MegarlInitInfo
    update_info_cls = MegarlUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.device.type == "cpu":
            prepack_updated_experts()
        self._receiver: Receiver | None = None
        self._needs_restart: str | None = None  # the failure that left the model partly loaded

    def init_transfer_engine(self, init_info: MegarlInitInfo) -> None:
        """Join the group. vLLM calls this again for every new generation.

        Raises:
            ValueError: the rebuilt plan differs from the sender's.
            WeightSyncError: not all members joined before the deadline, or a failed sync left this worker between start
                and finish.
        """
        if self._needs_restart is not None:
            raise WeightSyncError(
                "this replica was left in the middle of a failed weight sync and must be restarted: "
                f"{self._needs_restart}"
            )
        self.shutdown()
        plan = unpack_manifest(init_info.manifest, init_info.plan_hash)
        members = GroupMembers.from_json(init_info.members)
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = SyncStore(init_info.host, init_info.port)
        group = Group(store, members, members.offset(init_info.replica) + worker)
        group.join(init_info.timeout_s)
        device = self.device if members.backend == "nccl" else torch.device("cpu")
        self._receiver = Receiver(group, plan, _LayerwiseLoader(self), device)

    def start_weight_update(self) -> None:
        """Prepare the model for vLLM's layer-wise reload."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            tune_malloc(MMAP_DURING_SYNC)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, check and load all buckets. The base class's method would also synchronise an accelerator on CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MegarlUpdateInfo) -> None:
        """Receive one sync. Raises WeightSyncError after the failure was reported to the other members."""
        if self._receiver is None:
            raise WeightSyncError("update_weights was called before init_weight_transfer_engine")
        try:
            self._receiver.receive(
                update_info.sync, update_info.version, update_info.timeout_s, plan_hash=update_info.plan_hash
            )
        except BaseException as error:
            self._needs_restart = str(error) or repr(error)
            raise

    def finish_weight_update(self) -> None:
        """Finish vLLM's layer-wise reload."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            prepack_tied_head(self.model)
            tune_malloc(MMAP_OTHERWISE)

    def shutdown(self) -> None:
        """Leave the group. The model keeps its weights."""
        if self._receiver is not None:
            self._receiver.group.close()
            self._receiver = None


class _LayerwiseLoader:
    """A `Loader` that calls vLLM's `load_weights` inside one layer-wise reload.

    vLLM refers to loaded tensors until their module is complete.
    """

    def __init__(self, engine: MegarlWeightTransferEngine) -> None:
        self._engine = engine

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with torch.no_grad(), disable_mtp_completeness_check():
            self._engine.model.load_weights(tensors)

    def detach(self, buffer_B: torch.Tensor) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        storage = buffer_B.untyped_storage().data_ptr()
        for module in self._engine.model.modules():
            for _, bound in get_layerwise_info(module).loaded_weights:
                for key, value in bound.arguments.items():
                    if not isinstance(value, torch.Tensor) or value.is_meta:
                        continue
                    if value.untyped_storage().data_ptr() == storage:
                        bound.arguments[key] = value.clone()


def tune_malloc(mmap_threshold: int) -> None:
    """Make glibc map each block of at least `mmap_threshold` bytes separately, and return free memory. CPU only.

    Loading allocates and frees tensors of many sizes in different orders. By default glibc keeps blocks below 32 MiB on
    its heap, which is then fragmented and grows with every sync.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
        libc.malloc_trim(0)


def prepack_updated_experts() -> None:
    """Patch vLLM 0.32 so that a weight update pads and packs the experts' weights. CPU only. Idempotent.

    `UnquantizedFusedMoEMethod._setup_kernel` processes the experts' weights at the first load only. On CPU that step
    changes the weights, so after an update without it the MoE layers compute wrong results without an error.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def setup_kernel(
        self: UnquantizedFusedMoEMethod, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor
    ) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel


def prepack_tied_head(model: torch.nn.Module) -> None:
    """Pack the output head's weight again after an update, which vLLM 0.32 omits for tied embeddings. CPU only.

    The layer-wise reload gives the shared weight to the embedding alone, so without this the head's kernel keeps a
    packed copy of the old weight, and the logits do not follow the weights.
    https://github.com/vllm-project/vllm, model_executor/layers/utils.py, `dispatch_cpu_unquantized_gemm`.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
