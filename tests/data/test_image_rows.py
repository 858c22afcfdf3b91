"""Rows with images: every form that data sets have, every mistake by file and row, and their place in the prompt."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.chat.images import PromptImages, read_image
from megarl.chat.tokenize import PromptEncoder, PromptTooLongError
from megarl.config.schema import VisionConfig
from megarl.config.schema.data import DataConfig
from megarl.data.dataset import PromptDataset, load_prompts, row_mistakes
from tests.support.models.tiny_vision import IMAGE, make_tiny_vision, picture, vision_tokenizer

ONE, TWO = picture(90, 60, 1), picture(130, 170, 2)
KIND = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("problem", pa.string()),
        ("answer", pa.string()),
    ]
)


def load(path: Path, **config: Any) -> PromptDataset:
    return load_prompts(path, DataConfig(path=path, **{"images_field": "images", **config}))


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=KIND), path)
    return path


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> PromptImages:
    model = make_tiny_vision(tmp_path_factory.mktemp("model"))
    raw = json.loads((model / "config.json").read_text())
    found = PromptImages.of(model, SimpleNamespace(vision=object(), raw=raw), VisionConfig(images_per_prompt=2))
    assert found is not None
    return found


def test_rows_as_geometry3k_is_published(tmp_path: Path) -> None:
    row = {"images": [{"bytes": ONE, "path": None}], "problem": "<image>Find x.", "answer": "3"}
    text = {"images": None, "problem": "2 + 3?", "answer": "5"}
    first, second = load(parquet(tmp_path / "rows.parquet", row, text), suffix=" Think.")
    assert first.images == (ONE,) and first.text == "<image>Find x. Think."
    assert first.row == {"problem": "<image>Find x.", "answer": "3"}  # rewards and agents get no bytes
    assert second.images == () and second.text == "2 + 3? Think."


def test_paths_are_relative_to_the_file_and_lead_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "data" / "png").mkdir(parents=True)
    (tmp_path / "data" / "png" / "a.png").write_bytes(ONE)
    (tmp_path / "secret.png").write_bytes(TWO)
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    path = tmp_path / "data" / "rows.jsonl"
    for given in ("png/a.png", ["png/a.png"], {"path": "png/a.png"}, [{"path": "png/a.png", "bytes": None}]):
        (prompt,) = load(jsonl(path, {"images": given, "problem": "Find x."}))
        assert [read_image(each) for each in prompt.images] == [ONE]
    for given in ("../secret.png", str(tmp_path / "secret.png"), "link.png"):
        assert (path.parent / given).read_bytes() == TWO  # an unguarded reader would take it
        with pytest.raises(ValueError, match=r"rows.jsonl:2: field 'images': an image must lie below"):
            load(jsonl(path, {"problem": "x"}, {"images": given, "problem": "Find x."}))
    with pytest.raises(ValueError, match="no such file"):
        load(jsonl(path, {"images": "png/b.png", "problem": "Find x."}))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<image>Compare<image>", "<image>Compare<image>"),
        ("Compare.", "<image><image>Compare."),
        ([{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image", "text": None}], "<image>and<image>"),
    ],
)
def test_marks_parts_or_none(tmp_path: Path, content: Any, expected: str) -> None:
    for name, each in (("a.png", ONE), ("b.png", TWO)):
        (tmp_path / name).write_bytes(each)
    messages = [{"role": "system", "content": "An <image> of the system stays."}, {"role": "user", "content": content}]
    path = jsonl(tmp_path / "rows.jsonl", {"images": ["a.png", "b.png"], "messages": messages})
    (prompt,) = load(path)
    assert prompt.text == expected
    assert prompt.messages[0]["content"] == "An <image> of the system stays."


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"images": ["a.png"], "problem": "<image> and <image>"}, "1 images for 2 marks"),
        ({"problem": "<image> and nothing"}, "0 images for 1 marks"),
        ({"images": [7], "problem": "x"}, "bytes, a path"),
        ({"images": ["rows.svg"], "problem": "x"}, "SVG"),
    ],
)
def test_mistakes_are_named_by_file_and_row(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    (tmp_path / "a.png").write_bytes(ONE)
    (tmp_path / "rows.svg").write_text("<svg/>")
    with pytest.raises(ValueError, match=rf"rows.jsonl:1: .*{told}"):
        load(jsonl(tmp_path / "rows.jsonl", row))


def test_a_dry_run_decodes_and_a_run_reads_headers(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(ONE[:-200])
    path = jsonl(tmp_path / "rows.jsonl", {"problem": "x"}, {"images": "a.png", "problem": "x"})
    config = DataConfig(path=path, images_field="images")
    assert len(load(path)) == 2
    (mistake,) = row_mistakes(path, config)
    assert mistake.where == f"{path}:2" and "cannot be decoded" in str(mistake)


def encoder(images: PromptImages | None, limit: int | None = None) -> PromptEncoder:
    return PromptEncoder(vision_tokenizer(), limit, images=images)


def test_each_image_has_its_tokens_where_the_template_writes_it(tmp_path: Path, images: PromptImages) -> None:
    row = {
        "images": [{"bytes": each, "path": None} for each in (ONE, TWO)], "problem": "<image>A<image>B", "answer": "3",
    }  # fmt: skip
    (prompt,) = load(parquet(tmp_path / "rows.parquet", row))
    ids, refs = encoder(images).encode_images(prompt)
    text = encoder(images).tokenizer.decode(ids)
    one, two = refs
    assert [(each.height, each.width) for each in refs] == [images.processor.size(each) for each in (ONE, TWO)]
    pads = [f"<|vision_start|>{IMAGE * each.tokens}<|vision_end|>" for each in refs]
    assert text == f"<|im_start|>user\n{pads[0]}A{pads[1]}B<|im_end|>\n<|im_start|>assistant\n"
    for ref, content in ((one, ONE), (two, TWO)):
        assert ids[ref.offset : ref.end] == [images.token] * ref.tokens
        assert ids[ref.offset - 1] != images.token != ids[ref.end]
        assert ref.hash == images.processor.hash(content)
    with pytest.raises(PromptTooLongError, match=f"has {len(ids)} tokens"):
        encoder(images, len(ids) - 1).encode(prompt)
    assert list(encoder(images, len(ids)).valid_indices([prompt])) == [0]


def test_images_that_the_model_would_not_be_shown_are_refused(tmp_path: Path, images: PromptImages) -> None:
    three = {"images": [{"bytes": ONE, "path": None}] * 3, "problem": "x", "answer": "3"}
    path = parquet(tmp_path / "rows.parquet", three)
    with pytest.raises(ValueError, match=r"row 1 has 3 images; model.vision.images_per_prompt allows 2"):
        encoder(images).encode(load(path)[0])
    with pytest.raises(ValueError, match="column `images`, which the model would not be shown"):
        encoder(images).encode(load(path, images_field=None)[0])
    with pytest.raises(ValueError, match="no vision tower"):
        encoder(None).encode(load(path)[0])
    written = {"images": [{"bytes": ONE, "path": None}], "problem": f"<image>{IMAGE}", "answer": "3"}
    with pytest.raises(ValueError, match="2 image tokens after the chat template, for 1 images"):
        encoder(images).encode(load(parquet(path, written))[0])


def test_text_of_a_model_that_sees_has_no_images(images: PromptImages, tmp_path: Path) -> None:
    (prompt,) = load(jsonl(tmp_path / "rows.jsonl", {"problem": "2 + 3?"}), images_field=None)
    assert encoder(images).encode_images(prompt) == (encoder(None).encode(prompt), ())
