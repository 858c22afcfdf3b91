"""The check of a run's weight files before anything starts: from their headers, no tensor is read."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.checkpoint.format.megatron_files import MegatronDirectory
from megarl.config.schema import Config
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.load import check_tensors
from megarl.models.hf.model_files import megatron_step
from megarl.models.hf.safetensors import SafetensorsDirectory
from megarl.models.megatron.shards import table


def weight_problems(config: Config, info: ModelInfo) -> Iterator[str]:
    """Yield what is wrong with the weights that the trainer loads, as `key: what is wrong`.

    The files must be complete, and hold exactly the tensors of the family with the shapes that config.json implies.
    """
    loaded = [("model.path", config.model.path)] if config.model.load_weights else []
    if config.needs_reference and config.reference.path is not None:
        loaded.append(("reference.path", config.reference.path))
    for key, path in loaded:
        try:
            if megatron_step(path) is not None:
                MegatronDirectory(path)
                continue
            with SafetensorsDirectory(path) as files:
                check_tensors(files, table(info), info)
        except (ValueError, OSError) as error:
            yield f"{key}: {error}"
