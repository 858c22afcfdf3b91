"""The platform of a process: CUDA with NCCL, or a CPU with emulations of Megatron-Core's CUDA calls."""

from megarl.platforms.platform import Platform, activate, current

__all__ = ["Platform", "activate", "current"]
