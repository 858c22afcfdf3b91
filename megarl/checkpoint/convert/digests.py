"""Checks the files of a Megatron checkpoint that a conversion reads against the checkpoint's manifest."""

from __future__ import annotations

from megarl.checkpoint.format.manifest import MANIFEST, DamagedCheckpointError, Manifest, check_files
from megarl.checkpoint.format.megatron_files import MegatronDirectory
from megarl.models.hf.model_files import HF_FILES


def has_manifest(model: MegatronDirectory) -> bool:
    """Tell whether the checkpoint has a manifest; one written by Megatron-LM has none."""
    return (model.step / MANIFEST).is_file()


def check_digests(model: MegatronDirectory, rank: int = 0, ranks: int = 1) -> int:
    """Check the share of `rank` of `ranks` of the weights' files, their index and `hf/`; return the number of files.

    Every byte is read. Raises DamagedCheckpointError naming each file that differs from its entry in the manifest, or
    that has no entry.
    """
    manifest = Manifest.read(model.step)
    weights = {str(path.relative_to(model.step)) for path in model.files()}
    unknown = sorted(weights - manifest.files.keys())
    if unknown:
        raise DamagedCheckpointError(f"{model.step / MANIFEST} has no entry for {', '.join(unknown)}")
    wanted = {
        name: entry for name, entry in manifest.files.items() if name in weights or name.startswith(f"{HF_FILES}/")
    }
    names = Manifest(manifest.step, wanted).share(rank, ranks)
    problems = check_files(model.step, wanted, names)
    if problems:
        raise DamagedCheckpointError("the checkpoint is damaged:\n" + "\n".join(problems))
    return len(names)
