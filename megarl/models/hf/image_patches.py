"""Makes the vision tower's input of an image file: uint8 patches, the same ones for every engine and for the trainer.

Both sides use the Pillow backend of transformers, whatever else is installed: torchvision's resizes to other pixels.
Sizes are checked by a file's header, before anything is decoded.
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
MOST_PIXELS = 50_000_000  # as the file has them: 150 MB decoded
MOST_ASPECT = 200  # of the longer side to the shorter one, beyond which the processor refuses an image
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow has others, which run programs or read other files
CACHE_BYTES = 256 << 20  # of the patches that a process keeps
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF tag of cameras, and its values that swap the sides


class ImageError(ValueError):
    """An image that cannot be used; the message says why, and the caller adds where it is from."""


def open_image(content: bytes) -> Image.Image:
    """Return an image of which only the header is read. Raises ImageError for a file that must not be decoded."""
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
    """Return how a camera was held. Of other formats than JPEG the whole file would have to be read for it."""
    return int(image.getexif().get(_ORIENTATION, 1)) if image.format == "JPEG" else 1


class ImageProcessor:
    """The image processor of a model, with an upper bound on the pixels. Any thread may use it.

    Attributes:
        merge: the side of the square of patches that become one token.
        mean, std: what the patches, divided by 255, are normalised by, for each of the three channels.
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
        """Return what identifies the pixels: the digest of a file's bytes and of the settings."""
        return hashlib.sha256(self._settings + content).hexdigest()

    def size(self, content: bytes) -> tuple[int, int]:
        """Return the rows and columns of tokens that stand for an image, by its header. Raises ImageError."""
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
        """Return the patches of the image with a hash, if it is one of the latest that `patches_of` was asked for."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    def patches_of(self, image: ImageRef, content: bytes) -> np.ndarray:
        """Return the patches of an image, and keep them. Raises ImageError if `content` is not its file.

        So it is if the file has changed since the prompt was encoded, or that process has other settings.
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
