"""What the process runs on: CUDA with NCCL, or a CPU that emulates the few CUDA calls Megatron-Core makes."""

from megarl.platforms.platform import Platform, activate, current

__all__ = ["Platform", "activate", "current"]
