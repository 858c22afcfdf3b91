"""The defaults that one rank sets on modules and wrappers of a policy, without the GPU that profits from them."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megarl.checkpoint.save.training_state import inner_optimizers
from megarl.models.megatron import build_model
from megarl.trainer import policy as policy_module
from megarl.trainer import reference_policy
from tests.support.ranks.training.policy import policy_under


def ddp_settings(model_dir: Path, **changes: Any) -> dict[str, Any]:
    """The fields of DDP's config that decide what overlaps, and whether the forward hooks that gather are there."""
    with policy_under(model_dir, {}, **changes) as policy:
        [chunk] = policy.module_chunks
        ddp = chunk.ddp_config
        return {
            "grad": ddp.overlap_grad_reduce,
            "param": ddp.overlap_param_gather,
            "optimizer": policy.optimizer.config.overlap_param_gather,
            "gathers_in_forward": chunk.use_forward_hook,
            "no_sync": policy.tf_config.no_sync_func is not None,
        }


def fused_flags(model_dir: Path, **changes: Any) -> tuple[set[bool], set[bool], int]:
    """The flags of policy and reference, whose linear modules have the attribute of Transformer Engine's here.

    The number is that of the modules of the policy that have it.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        chunks = build_model.build_model(*args, **kwargs)
        for chunk in chunks:
            for name, module in chunk.decoder.named_modules():
                if "linear" in name.rpartition(".")[2]:
                    module.fuse_wgrad_accumulation = False
        return chunks

    def flags(chunks: list[torch.nn.Module]) -> list[bool]:
        modules = [module for chunk in chunks for module in chunk.modules()]
        return [m.fuse_wgrad_accumulation for m in modules if hasattr(m, "fuse_wgrad_accumulation")]

    with (
        mock.patch.object(policy_module, "build_model", build),
        mock.patch.object(reference_policy, "build_model", build),
        policy_under(model_dir, {}, **changes) as policy,
    ):
        assert policy.reference is not None
        own = flags(policy.module_chunks)
        return set(own), set(flags(policy.reference.chunks)), len(own)


def undecayed(model_dir: Path) -> dict[str, set[int]]:
    """The numbers of dimensions of a policy's parameters, by whether weight decay changes them."""
    with policy_under(model_dir, {}, trainer__optimizer__distributed=False) as policy:
        found: dict[str, set[int]] = {"decayed": set(), "kept": set()}
        shapes = {parameter: parameter.dim() for chunk in policy.module_chunks for parameter in chunk.parameters()}
        groups = [group for each in inner_optimizers(policy.optimizer) for group in each.optimizer.param_groups]
        for group in groups:
            found["decayed" if group["wd_mult"] else "kept"] |= {each.dim() for each in group["params"]}
        assert sum(len(group["params"]) for group in groups) == len(shapes)
        return found
