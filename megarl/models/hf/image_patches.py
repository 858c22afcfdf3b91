"""Turns an image file into the vision tower's input: uint8 patches, identical for every engine and the trainer.

Both sides use transformers' Pillow backend, whatever else is installed: torchvision's resizing gives other pixels.
Sizes are checked in the file's header before anything is decoded.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.models.hf.model_files import hf_files
from megarl.queue.images import ImageRef

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

MOST_BYTES = 32 << 20  # of a file
MOST_PIXELS = 50_000_000  # in the file: 150 MB decoded
MOST_ASPECT = 200  # longer side / shorter side; the processor refuses more
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # some of Pillow's other formats run programs or read other files
CACHE_BYTES = 256 << 20  # of the patches that a process keeps
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF tag of cameras, and its values that swap the sides


class ImageError(ValueError):
    """An image that cannot be used; the message says why, and the caller adds its source."""


def open_image(content: bytes) -> Image.Image:
    """Read an image's header only. Raises ImageError for a file that must not be decoded."""
    from PIL import Image

    if len(content) > MOST_BYTES:
        raise ImageError(f"an image file of {len(content):,} bytes; at most {MOST_BYTES:,} are read")
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # whatever Pillow's readers raise for a broken header
        what = "an SVG or XML file" if content.lstrip()[:1] == b"<" else "no image file that can be read"
        if isinstance(error, Image.DecompressionBombError):
            what = f"an image whose header claims too many pixels; at most {MOST_PIXELS:,} are decoded"
        raise ImageError(f"{what}; convert it to one of {', '.join(FORMATS)}") from error
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ImageError(f"an image of {width} x {height} pixels; at most {MOST_PIXELS:,} are decoded")
    if max(width, height) > MOST_ASPECT * max(1, min(width, height)):
        raise ImageError(f"an image of {width} x {height} pixels: a side may be at most {MOST_ASPECT} times the other")
    return image


def _orientation(image: Image.Image) -> int:
    """Return a JPEG's EXIF orientation, else 1: other formats would have to be read whole."""
    return int(image.getexif().get(_ORIENTATION, 1)) if image.format == "JPEG" else 1


class ImageProcessor:
    """A model's image processor, with an upper bound on the pixels. Thread-safe.

    Attributes:
        merge: side of the square of patches that become one token.
        mean, std: per channel, the normalisation of patches divided by 255.
    """

    def __init__(self, model_dir: Path | str, max_pixels: int) -> None:
        """Read the settings of a model. Raises ValueError if it has none, or those of another kind of processor."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        directory = hf_files(model_dir)
        try:
            made: Any = Qwen2VLImageProcessorPil.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory} has no image processor (preprocessor_config.json): {error}") from error
        kind = str(made.to_dict().get("image_processor_type", ""))
        if not kind.startswith("Qwen2VLImageProcessor"):
            raise ValueError(f"{directory}/preprocessor_config.json: image processor {kind!r} is not supported")
        self._processor = made
        self.merge, self.patch = int(made.merge_size), int(made.patch_size)
        self.mean, self.std = tuple(map(float, made.image_mean)), tuple(map(float, made.image_std))
        self._least = min(int(made.size["shortest_edge"]), max_pixels)
        self._most = max(min(int(made.size["longest_edge"]), max_pixels), (self.patch * self.merge) ** 2)
        settings = [kind, self.patch, self.merge, made.temporal_patch_size, int(made.resample), self._least, self._most]
        self._settings = hashlib.sha256(json.dumps([settings, self.mean, self.std]).encode()).digest()
        self._lock, self._kept, self._kept_bytes = threading.Lock(), OrderedDict[str, Any](), 0

    def hash(self, content: bytes) -> str:
        """Return the identity of the pixels: a digest of the file's bytes and the settings."""
        return hashlib.sha256(self._settings + content).hexdigest()

    def size(self, content: bytes) -> tuple[int, int]:
        """Return the rows and columns of tokens of an image, from its header. Raises ImageError."""
        image = open_image(content)
        width, height = image.size
        return self._tokens(*((width, height) if _orientation(image) in _TURNED else (height, width)))

    def _tokens(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        side = self.patch * self.merge
        new_height, new_width = smart_resize(height, width, side, self._least, self._most)
        return new_height // side, new_width // side

    def patches(self, content: bytes) -> np.ndarray:
        """Return the patches of an image in the processor's order, uint8 [tokens * merge**2, values of a patch].

        Raises ImageError for a file that cannot be decoded.
        """
        import numpy as np
        from PIL import ImageOps

        image = open_image(content)
        try:
            turned = ImageOps.exif_transpose(image) if _orientation(image) != 1 else image
            shown = turned.convert("RGB")
        except Exception as error:  # whatever Pillow's decoders raise for damaged data
            raise ImageError(f"an image that cannot be decoded: {type(error).__name__}: {error}") from error
        size = {"shortest_edge": self._least, "longest_edge": self._most}
        made = self._processor([shown], size=size, do_rescale=False, do_normalize=False, return_tensors="np")
        patches: np.ndarray = made["pixel_values"].astype(np.uint8)
        return patches

    def known(self, name: str) -> np.ndarray | None:
        """Return the cached patches of the image with this hash, or None."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    def patches_of(self, image: ImageRef, content: bytes) -> np.ndarray:
        """Return the patches of an image, and cache them.

        Raises ImageError if `content` is not its file: the file has changed since the prompt was encoded, or that
        process had other settings.
        """
        if (found := self.known(image.hash)) is not None:
            return found
        if (own := self.hash(content)) != image.hash:
            raise ImageError(f"its file and the processor's settings have the hash {own[:12]}, not {image.hash[:12]}")
        made = self.patches(content)
        if len(made) != image.tokens * self.merge**2:
            raise ImageError(f"it has {len(made)} patches, and {image.tokens} tokens stand for it")
        with self._lock:
            if image.hash not in self._kept:
                self._kept[image.hash] = made
                self._kept_bytes += made.nbytes
            while self._kept_bytes > CACHE_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return made
