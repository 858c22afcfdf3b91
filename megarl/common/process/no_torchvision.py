"""Let vLLM run vision-language models without torchvision, as on a CPU: PyPI's torchvision wheel needs CUDA.

transformers then uses Pillow's image processor, and lacks two things, which the functions below supply (vLLM 0.32,
transformers 5.19). Every process of an engine needs them, also the one that inspects a model's class. So vLLM's plugin
applies them where one of the variables is set.
"""

import importlib
import importlib.util
import sys
from types import SimpleNamespace

VARIABLE = "MEGARL_VISION"  # in the environment of an engine with a vision model
# The same with Gated DeltaNet layers: vLLM has its text models in the module of its vision models.
DELTA_NET = "MEGARL_DELTA_NET"
VERSIONS = {"vllm": "0.32", "transformers": "5.19"}


def apply() -> None:
    """Apply all replacements where torchvision is absent. Idempotent. Raises RuntimeError for other versions."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for package, known in VERSIONS.items():
        if not (found := importlib.import_module(package).__version__).startswith(f"{known}."):
            raise RuntimeError(
                f"{package} {found}: the replacements for torchvision are those of {known}; install torchvision, or "
                f"{package} {known}"
            )
    for replacement in REPLACEMENTS:
        replacement()


def resize_of_images() -> None:
    """Find `smart_resize` in Pillow's module. vLLM imports it from the module that imports torchvision."""
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pillow

    sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", pillow)


def processors_without_videos() -> None:
    """Load no video processor with a model's processor; vLLM reads settings of it though no video is ever shown."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.processing_utils import VideosKwargs

    settings = SimpleNamespace(
        valid_kwargs=VideosKwargs, size={"shortest_edge": 4096, "longest_edge": 25_165_824}, merge_size=2,
        temporal_patch_size=2, patch_size=16, fps=2, min_frames=4, max_frames=768,
    )  # fmt: skip
    for processor in (Qwen2_5_VLProcessor, Qwen3VLProcessor):
        processor.get_attributes = classmethod(lambda cls: ["image_processor", "tokenizer"])
        processor.video_processor = settings


REPLACEMENTS = (resize_of_images, processors_without_videos)
