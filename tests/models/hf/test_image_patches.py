"""Patches equal the processor's, and files that must not be decoded are refused by their headers."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from megarl.models.hf import image_patches
from megarl.models.hf.image_patches import ImageError, ImageProcessor
from megarl.queue.images import ImageRef
from tests.support.models.tiny_vision import PATCH, make_tiny_vision, picture

WIDE = 64 * 28 * 28


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp(family), family)


@pytest.fixture
def processor(model: Path) -> ImageProcessor:
    return ImageProcessor(model, WIDE)


@pytest.mark.parametrize(("width", "height", "kind"), [(90, 60, "PNG"), (500, 400, "JPEG"), (30, 31, "WEBP")])
def test_patches_and_sizes_equal_the_processors(
    processor: ImageProcessor, family: str, width: int, height: int, kind: str
) -> None:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    content = picture(width, height, 1, kind)
    mean, std = processor.mean, processor.std
    own = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4 * 28 * 28, "longest_edge": WIDE}, patch_size=PATCH[family], image_mean=mean,
        image_std=std,
    )  # fmt: skip
    expected = own([Image.open(io.BytesIO(content)).convert("RGB")], return_tensors="np")
    patches, (rows, columns) = processor.patches(content), processor.size(content)
    assert patches.dtype == np.uint8
    assert expected["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
    scaled = patches.reshape(len(patches), 3, -1) / np.float32(255)
    normal = (scaled - np.array(mean)[:, None]) / np.array(std)[:, None]
    np.testing.assert_allclose(normal.reshape(patches.shape), expected["pixel_values"], atol=1e-5)


def test_larger_images_are_scaled_down_to_the_bound_and_have_another_hash(model: Path) -> None:
    content = picture(500, 400)
    small, large = ImageProcessor(model, 20 * 28 * 28), ImageProcessor(model, WIDE)
    side = small.patch * small.merge
    rows, columns = small.size(content)
    assert rows * columns * side**2 <= 20 * 28 * 28 < np.prod(large.size(content)) * side**2
    assert len(small.patches(content)) == 4 * rows * columns
    assert small.hash(content) != large.hash(content)
    assert small.hash(content) == ImageProcessor(model, 20 * 28 * 28).hash(content) != small.hash(content + b"\0")


def test_photos_are_turned_as_the_camera_was_held(processor: ImageProcessor) -> None:
    from PIL import Image

    image = Image.open(io.BytesIO(picture(120, 60)))
    out, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    image.save(out, "JPEG", exif=exif)
    rows, columns = processor.size(out.getvalue())
    assert rows > columns
    assert len(processor.patches(out.getvalue())) == 4 * rows * columns


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, and whose data is a few bytes."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (png_of(31_623, 31_623), "pixels"),
        (png_of(8_000, 7_000), "8000 x 7000 pixels"),
        (png_of(5_000, 10), "200 times"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "no image file"),
        (b"", "no image file"),
    ],
)
def test_files_that_must_not_be_decoded_are_refused(processor: ImageProcessor, content: bytes, told: str) -> None:
    for use in (processor.size, processor.patches):
        with pytest.raises(ImageError, match=told):
            use(content)


def test_large_files_are_refused_before_they_are_opened(
    processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = picture(60, 60)
    processor.size(content)
    monkeypatch.setattr(image_patches, "MOST_BYTES", len(content) - 1)
    with pytest.raises(ImageError, match="bytes"):
        processor.size(content)


def test_damaged_data_is_refused_when_it_is_decoded(processor: ImageProcessor) -> None:
    content = picture(90, 60)[:-200]
    processor.size(content)
    with pytest.raises(ImageError, match="cannot be decoded"):
        processor.patches(content)


def test_the_latest_patches_are_kept_within_a_bound(processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [picture(60, 60, seed) for seed in range(3)]
    refs = [ImageRef(processor.hash(each), 0, *processor.size(each)) for each in files]
    first = processor.patches_of(refs[0], files[0])
    assert processor.known(refs[0].hash) is first is processor.patches_of(refs[0], b"not decoded again")
    monkeypatch.setattr(image_patches, "CACHE_BYTES", 2 * first.nbytes)
    for ref, each in zip(refs[1:], files[1:], strict=True):
        processor.patches_of(ref, each)
    assert [processor.known(each.hash) is not None for each in refs] == [False, True, True]


def test_a_file_that_is_not_the_images_is_refused(processor: ImageProcessor) -> None:
    one, other = picture(60, 60, 1), picture(60, 60, 2)
    rows, columns = processor.size(one)
    with pytest.raises(ImageError, match="hash"):
        processor.patches_of(ImageRef(processor.hash(other), 0, rows, columns), one)
    with pytest.raises(ImageError, match="tokens stand for it"):
        processor.patches_of(ImageRef(processor.hash(one), 0, rows, columns + 1), one)


def test_models_without_such_a_processor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="preprocessor_config"):
        ImageProcessor(tmp_path, WIDE)
