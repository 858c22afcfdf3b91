"""Opens a path as a model's Hugging Face tensors, in whichever of the two formats it is."""

from __future__ import annotations

from pathlib import Path

from megarl.checkpoint.format.hf_files import HFDirectory
from megarl.checkpoint.format.megatron_files import MegatronDirectory
from megarl.common.errors import ConversionError
from megarl.models.hf.model_files import megatron_step


def open_model(path: Path, *, allow_pickle: bool = False) -> HFDirectory | MegatronDirectory:
    """Open a Hugging Face directory or a Megatron checkpoint.

    Raises ConversionError if `path` is neither, ValueError naming file and tensor if it is damaged.
    """
    if not path.is_dir():
        raise ConversionError(f"{path} is not a directory")
    if step := megatron_step(path):
        return MegatronDirectory(step)
    if not (path / "config.json").is_file():
        raise ConversionError(
            f"{path} is neither a Hugging Face directory (no config.json) nor a Megatron checkpoint (no tracker file)"
        )
    return HFDirectory(path, allow_pickle=allow_pickle)


def open_hf(path: Path, *, allow_pickle: bool = False) -> HFDirectory:
    """Open the Hugging Face directory that `--hf` names.

    Raises ConversionError if `path` is none, ValueError naming file and tensor if it is damaged.
    """
    if not path.is_dir():
        raise ConversionError(f"--hf {path} {'is not a directory' if path.exists() else 'does not exist'}")
    if step := megatron_step(path):
        raise ConversionError(
            f"--hf {path} is a Megatron checkpoint already ({step.name}); training can start from it without a "
            "conversion, and export converts it to a Hugging Face directory"
        )
    if not (path / "config.json").is_file():
        raise ConversionError(f"--hf {path} is not a Hugging Face directory: it has no config.json")
    return HFDirectory(path, allow_pickle=allow_pickle)
