"""Whether a Megatron checkpoint still is what was written: what a conversion reads of it, against its manifest."""

from __future__ import annotations

from megarl.checkpoint.format.manifest import MANIFEST, DamagedCheckpointError, Manifest, check_files
from megarl.checkpoint.format.megatron_files import MegatronDirectory
from megarl.models.source import HF_FILES


def has_manifest(model: MegatronDirectory) -> bool:
    """A checkpoint that Megatron-LM wrote has none."""
    return (model.step / MANIFEST).is_file()


def check_digests(model: MegatronDirectory, rank: int = 0, ranks: int = 1) -> int:
    """Read what `rank` of `ranks` has to check of the weights' files, their index and `hf/`; how many files that were.

    Raises DamagedCheckpointError naming each file that is not what the manifest says, or that it does not know.
    """
    manifest = Manifest.read(model.step)
    weights = {str(path.relative_to(model.step)) for path in model.files()}
    unknown = sorted(weights - manifest.files.keys())
    if unknown:
        raise DamagedCheckpointError(f"{model.step / MANIFEST} does not know {', '.join(unknown)}")
    wanted = {
        name: entry for name, entry in manifest.files.items() if name in weights or name.startswith(f"{HF_FILES}/")
    }
    names = Manifest(manifest.step, wanted).share(rank, ranks)
    problems = check_files(model.step, wanted, names)
    if problems:
        raise DamagedCheckpointError("the checkpoint is damaged:\n" + "\n".join(problems))
    return len(names)
