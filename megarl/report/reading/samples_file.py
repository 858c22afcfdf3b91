"""Reads samples.jsonl: response lengths, and a few samples to show, without reading all of a large file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megarl.common.rundir import rotating_lines
from megarl.common.rundir.json_lines import read_json_lines

MOST_BYTES = 48 << 20  # read of all parts; larger ones are read in windows at equal distances
WINDOW_BYTES = 64 << 10
MOST_TEXT = 6000  # characters of a prompt or response on the page


class _Brief(msgspec.Struct):
    """The fields needed of every line; the decoder skips the texts."""

    step: int
    response_tokens: int = 0
    reward: float | None = None
    finish_reason: str = ""
    status: str = "ok"
    part: int = 0
    demonstrated: bool = False


class Sample(msgspec.Struct):
    """A line of samples.jsonl (`megarl.queue.sample_lines`); fields that older files lack have defaults."""

    step: int
    group_id: int = -1
    sample_index: int = -1
    prompt: str = ""
    response: str = ""
    parts: list[dict[str, str]] = msgspec.field(default_factory=list)
    reference: str | None = None
    reward: float | None = None
    reward_components: dict[str, float | None] = msgspec.field(default_factory=dict)
    finish_reason: str = ""
    response_tokens: int = 0
    versions: list[dict[str, int]] = msgspec.field(default_factory=list)
    status: str = "ok"
    failure: str = ""
    reward_error: str = ""
    dataset: str = ""
    part: int = 0
    demonstrated: bool = False


@dataclass(frozen=True)
class Place:
    """The place of a line, and its main values."""

    path: Path
    offset: int
    step: int
    tokens: int
    reward: float | None
    finish_reason: str
    failed: bool


@dataclass(frozen=True)
class SampleSet:
    """The samples of a run: the places of all lines read, and the samples to show. `whole`: no line was left out."""

    places: Sequence[Place]
    samples: Sequence[Sample]
    whole: bool

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each sample that was read and did not fail."""
        return [place.tokens for place in self.places if not place.failed]


def read_samples(run_dir: Path, count: int) -> SampleSet:
    """Read the samples, and choose `count` of them to show; empty if the run has written none."""
    path = run_dir / "samples.jsonl"
    places: list[Place] = []
    whole = True
    for part, start, end in windows([(each, each.stat().st_size) for _, each in _parts(path)]):
        whole = whole and start == 0
        places += _brief(part, start, end)
    chosen = choose(places, count)
    samples = [sample for place in chosen if (sample := _read(place)) is not None]
    return SampleSet(places, samples, whole)


def _parts(path: Path) -> list[tuple[int, Path]]:
    try:
        return rotating_lines.parts(path)
    except FileNotFoundError:  # a part was deleted meanwhile
        return []


def windows(parts: Sequence[tuple[Path, int]]) -> Iterator[tuple[Path, int, int]]:
    """Yield (part, start, end) of the bytes to read, for parts with the given sizes in bytes.

    That is everything up to `MOST_BYTES`, else windows of `WINDOW_BYTES` at equal distances, `MOST_BYTES` in all.
    """
    total = sum(size for _, size in parts)
    if total <= MOST_BYTES:
        yield from ((part, 0, size) for part, size in parts)
        return
    count = MOST_BYTES // WINDOW_BYTES
    begin = 0
    for part, size in parts:
        for number in range(count):
            start = number * total // count - begin
            if 0 <= start < size:
                yield part, start, min(start + WINDOW_BYTES, size)
        begin += size


def _brief(path: Path, start: int, end: int) -> Iterator[Place]:
    """Yield the samples that begin in a window; a line cut by its beginning belongs to the window before."""
    if start:
        with path.open("rb") as file:
            file.seek(start - 1)
            skipped = file.readline(end - start)
            start += len(skipped) - 1
            if not skipped.endswith(b"\n"):
                return
    for offset, line in read_json_lines(path, msgspec.json.Decoder(_Brief), start, end):
        if line.part == 0:
            reward = None if line.demonstrated else line.reward  # demonstrations are not judged
            yield Place(path, offset, line.step, line.response_tokens, reward, line.finish_reason, line.status != "ok")


def choose(places: Sequence[Place], count: int) -> list[Place]:
    """Choose samples to show, in the order of their steps.

    Half of them are at equal distances over the run, including the newest. The others are the newest and, from the last
    fifth, the longest, those with the lowest and highest reward, and failed ones.
    """
    if len(places) <= count:
        return list(places)
    spread = max(2, count // 2)
    numbers = {round(number * (len(places) - 1) / (spread - 1)) for number in range(spread)}
    recent = range(len(places) - max(1, len(places) // 5), len(places))
    rewarded = [number for number in recent if places[number].reward is not None]

    def reward(number: int) -> float:
        value = places[number].reward
        return 0.0 if value is None else value

    ranked: list[Sequence[int]] = [
        sorted(recent, key=lambda number: -places[number].tokens),
        sorted(rewarded, key=reward),
        sorted(rewarded, key=reward, reverse=True),
        [number for number in recent if places[number].failed],
        range(len(places) - 1, len(places) - 1 - count, -1),
    ]
    rank = 0
    while len(numbers) < count and any(rank < len(each) for each in ranked):
        for each in ranked:
            if rank < len(each) and len(numbers) < count:
                numbers.add(each[rank])
        rank += 1
    return [places[number] for number in sorted(numbers)]


def _read(place: Place) -> Sample | None:
    """Read the line at a place; None if its part was deleted meanwhile."""
    lines = read_json_lines(place.path, msgspec.json.Decoder(Sample), place.offset, place.offset + 1)
    return next((sample for _, sample in lines), None)


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """Return a text, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]}\n[… {len(text) - most:,} characters left out …]\n{text[head - most :]}"
