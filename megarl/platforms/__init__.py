"""The platform of a process: CUDA with NCCL, or a CPU with emulations of the CUDA calls that Megatron-Core makes."""

from megarl.platforms.platform import Platform, activate, current

__all__ = ["Platform", "activate", "current"]
