"""Fields of Megatron's configs for which megarl has other defaults than Megatron-Core; passed fields replace them."""

from __future__ import annotations

from typing import Any

from megarl.config.schema import Config


def ddp_fields(config: Config) -> dict[str, Any]:
    """Return the fields of DistributedDataParallelConfig: megarl's defaults, replaced by those of `megatron.ddp`.

    Gradients are summed in fp32. Their reduction overlaps the backward pass, and with the distributed optimizer the
    gather of new weights overlaps the next forward pass. Megatron-Core 0.16.1 allows the first with both optimizers,
    the second only together with the first and with the distributed one (param_and_grad_buffer.py:272, 318).
    """
    passed = config.megatron.ddp
    distributed = config.trainer.optimizer.distributed
    reduces = bool(passed.get("overlap_grad_reduce", True))
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": distributed,
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": distributed and reduces,
        **passed,
    }
