"""vLLM's entry point into megarl: loaded by vLLM in the front end, in EngineCore and in every worker."""

from __future__ import annotations

import multiprocessing

BACKEND = "megarl"


def register() -> None:
    """Register the weight-transfer backend; in vLLM's own children also arm death with their parent. Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "megarl.weights.engine", "MegarlWeightTransferEngine")
    if _is_vllm_child():
        from megarl.common.processes import die_with_parent

        die_with_parent()


def _is_vllm_child() -> bool:
    """True in EngineCore and engine workers, which multiprocessing starts under these names.

    Any other process that imports vLLM (the actor, a test, a user's script) keeps its own fate.
    """
    if multiprocessing.parent_process() is None:
        return False
    name = multiprocessing.current_process().name
    return name.startswith(("EngineCore", "VllmWorker"))
