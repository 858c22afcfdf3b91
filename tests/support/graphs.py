"""What a test must break before it drops a trained policy, so that the model and its process groups can go."""

from __future__ import annotations

from megatron.core.transformer.moe.moe_layer import MoELayer

from megarl.trainer.policy import Policy


def forget_last_graph(policy: Policy) -> None:
    """MoE layers keep tensors of the last forward pass. Their graph holds DDP's hooks where gc cannot see them.

    Without this, each MoE case would leave a model and some 16 process groups of three threads behind.
    """
    for chunk in policy.module_chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                module.token_dispatcher.__dict__.clear()
