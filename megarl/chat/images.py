"""The images of a prompt: found in its row, read within bounds, and placed among its token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.chat.formats import ImageSource, Message, Prompt, RowError
from megarl.common.files import inside
from megarl.config.schema import VisionConfig
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.image_patches import MOST_BYTES, ImageError, ImageProcessor, open_image
from megarl.queue.images import IMAGE_MARK, ImageRef


def with_images(prompt: Prompt, field: str | None, directory: Path) -> Prompt:
    """Return a prompt with the images from `field` of its row, which its `row` then lacks.

    Each mark `<image>` in the user's messages stands for one image, in order. Without marks the images come before the
    text of the last user message. Paths are relative to `directory`, and must stay inside. Raises RowError for values
    that are not images, and if there are not as many marks as images.
    """
    if field is None:
        return prompt
    images = _sources(prompt.row.get(field), field, directory)
    row = {name: value for name, value in prompt.row.items() if name != field}
    users = [at for at, message in enumerate(prompt.messages) if message["role"] == "user"]
    marks = sum(prompt.messages[at]["content"].count(IMAGE_MARK) for at in users)
    messages = list(prompt.messages)
    if images and not marks:
        last = messages[users[-1]]
        messages[users[-1]] = {**last, "content": IMAGE_MARK * len(images) + last["content"]}
    elif marks != len(images):
        detail = f": {len(images)} images for {marks} marks"
        raise RowError(f"field {field!r}: the user's messages must have one {IMAGE_MARK} for each image", detail)
    return replace(prompt, images=images, messages=messages, row=row)


def _sources(given: object, field: str, directory: Path) -> tuple[ImageSource, ...]:
    values = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return tuple(_source(value, field, directory) for value in values)


def _source(given: object, field: str, directory: Path) -> ImageSource:
    value = given
    if isinstance(value, dict):  # as in Hugging Face data sets
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise RowError(f"field {field!r}: an image must be bytes, a path, or {{bytes, path}}", f", not {given!r:.60}")
    try:
        path = inside(directory, value)
    except ValueError as error:
        raise RowError(
            f"field {field!r}: an image must lie below the directory of its data file", f": {error}"
        ) from None
    if not path.is_file():
        raise RowError(f"field {field!r}: no such file", f": {path}")
    return path


def check_images(prompt: Prompt, field: str | None, *, decode: bool) -> None:
    """Raise RowError for an image whose header is unacceptable; with `decode` also for a damaged one."""
    for source in prompt.images:
        try:
            check_image(read_image(source), decode=decode)
        except (ImageError, OSError) as error:
            raise RowError(f"field {field!r}: {error}") from error


def check_image(content: bytes, *, decode: bool) -> None:
    """Raise ImageError for a file whose header is unacceptable; with `decode` also for a damaged one."""
    image = open_image(content)
    try:
        if decode:
            image.load()
    except Exception as error:  # whatever Pillow's decoders raise for damaged data
        raise ImageError(f"an image that cannot be decoded: {type(error).__name__}: {error}") from error


def read_image(source: ImageSource) -> bytes:
    """Return an image's file. Raises ImageError, before the end is read, if it is too large; OSError if missing."""
    if isinstance(source, bytes):
        return source
    with source.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ImageError(f"{source} has more than {MOST_BYTES:,} bytes, the most that are read of an image file")
    return content


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages with marks as content parts, in the form for chat templates of vision models."""
    return [_parted(each) if each["role"] == "user" and IMAGE_MARK in each["content"] else each for each in messages]


def shown_text(text: str, images: int) -> str | list[dict[str, str]]:
    """Return message content of a text and some images, which come first unless the text has a mark for each."""
    marked = text if text.count(IMAGE_MARK) == images else IMAGE_MARK * images + text
    content: list[dict[str, str]] = _parted({"role": "tool", "content": marked})["content"]
    return content if images else text


def _parted(message: Message) -> Message:
    parts: list[dict[str, str]] = []
    for number, text in enumerate(message["content"].split(IMAGE_MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


@dataclass(frozen=True)
class PromptImages:
    """How images are shown to a model: its chat template writes `token` for each; a prompt has at most `most`."""

    processor: ImageProcessor
    token: int
    most: int

    @classmethod
    def of(cls, model: Path, info: ModelInfo, vision: VisionConfig) -> PromptImages | None:
        """Return a model's; None without a vision tower. Raises ValueError if its processor cannot be used."""
        if info.vision is None:
            return None
        return cls(ImageProcessor(model, vision.max_pixels), int(info.raw["image_token_id"]), vision.images_per_prompt)

    def placed(
        self, ids: Sequence[int], images: Sequence[ImageSource], name: str, offset: int = 0
    ) -> tuple[list[int], tuple[ImageRef, ...]]:
        """Return the ids with each image token repeated for the image's size, and the images' places.

        `name`: for messages; `offset`: the number of tokens before `ids`. Raises ValueError if there are too many
        images, if one cannot be used, or if the template did not write one token for each.
        """
        count = len(images)
        if count > self.most:
            raise ValueError(f"{name} has {count} images; model.vision.images_per_prompt allows {self.most}")
        if (written := sum(token == self.token for token in ids)) != count:
            raise ValueError(
                f"{name}: its text has {written} image tokens after the chat template, for {count} images; "
                "use a template that shows images, and remove image tokens from the text"
            )
        long: list[int] = []
        refs: list[ImageRef] = []
        for token in ids:
            if token != self.token:
                long.append(token)
                continue
            refs.append(self._ref(images[len(refs)], f"{name}: image {len(refs) + 1}", offset + len(long)))
            long += [token] * refs[-1].tokens
        return long, tuple(refs)

    def _ref(self, source: ImageSource, name: str, offset: int) -> ImageRef:
        try:
            content = read_image(source)
            return ImageRef(self.processor.hash(content), offset, *self.processor.size(content))
        except (ImageError, OSError) as error:
            raise ValueError(f"{name}: {error}") from error
