"""Makes training rows from a session of the gateway: one for each path of turns, with the exact tokens. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from megarl.queue.trajectory import FinishReason, VersionSpan


class SessionImage(msgspec.Struct, frozen=True):
    """An image that a turn's prompt adds to its parent's: the fields of `ImageRef`, and the file."""

    hash: str
    offset: int
    height: int
    width: int
    file: bytes


class SessionTurn(msgspec.Struct, frozen=True):
    """One turn of a session, as `GET /v1/sessions/ID` returns it. `prompt_ids`: all tokens before the response.

    A chat's turn also has the `messages` after its parent, and the `calls` of its response.
    """

    number: int
    parent: int | None
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...] = msgspec.field(name="weight_versions")
    finish_reason: FinishReason
    messages: tuple[tuple[str, str], ...] = ()
    calls: tuple[dict[str, Any], ...] = ()
    images: tuple[SessionImage, ...] = ()


@dataclass(frozen=True)
class SessionRow:
    """A path of turns from a root to a leaf. `turns`: their numbers.

    `prompt_ids`: the prompt of the root. `response_ids`: everything after it. `mask`: 1 for the tokens that this row
    trains; 0 for inserted tokens and for turns that an earlier row trains, which have log-prob 0 and no version.
    `sampled`: 1 for the tokens of all turns of the path.
    """

    turns: tuple[int, ...]
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    sampled: list[int]
    images: tuple[SessionImage, ...] = ()


def read_turns(content: Mapping[str, Any]) -> list[SessionTurn]:
    """Return the turns of the gateway's answer to `GET /v1/sessions/ID`."""
    return msgspec.convert(content["turns"], list[SessionTurn], strict=False)  # versions are text, as in vLLM


def session_rows(turns: Sequence[SessionTurn]) -> list[SessionRow]:
    """Return the rows of a session, in the order of their leaves; exactly one row trains each turn.

    Leaves with an empty response are left out. Raises ValueError if a turn does not continue its parent's tokens.
    """
    by_number = {turn.number: turn for turn in turns}
    rows: list[SessionRow] = []
    trained: set[int] = set()
    for leaf in _leaves(turns):
        path = [leaf]
        while path[0].parent is not None:
            path.insert(0, by_number[path[0].parent])
        rows.append(_row(path, trained))
        trained.update(turn.number for turn in path)
    return rows


def _leaves(turns: Sequence[SessionTurn]) -> list[SessionTurn]:
    """Return the turns with tokens that no turn with tokens continues, by number."""
    by_number = {turn.number: turn for turn in turns}
    continued: set[int] = set()
    for turn in turns:
        parent = turn.parent if turn.response_ids else None
        while parent is not None and parent not in continued:
            continued.add(parent)
            parent = by_number[parent].parent
    found = [turn for turn in turns if turn.response_ids and turn.number not in continued]
    return sorted(found, key=lambda turn: turn.number)


def _row(path: Sequence[SessionTurn], trained: set[int]) -> SessionRow:
    prompt = path[0].prompt_ids
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    sampled: list[int] = []
    spans: list[VersionSpan] = []
    for turn in path:
        known = len(prompt) + len(ids)
        if turn.prompt_ids[:known] != [*prompt, *ids]:
            raise ValueError(f"turn {turn.number} does not continue the tokens of turn {turn.parent}")
        inserted, count = turn.prompt_ids[known:], len(turn.response_ids)
        start, here = len(ids) + len(inserted), int(turn.number not in trained)
        ids += [*inserted, *turn.response_ids]
        logprobs += [0.0] * len(inserted) + (turn.logprobs if here else [0.0] * count)
        mask += [0] * len(inserted) + [here] * count
        sampled += [0] * len(inserted) + [1] * count
        if here:
            spans += [replace(span, start=start + span.start, end=start + span.end) for span in turn.versions]
    numbers = tuple(turn.number for turn in path)
    images = tuple(image for turn in path for image in turn.images)
    return SessionRow(numbers, prompt, ids, logprobs, mask, tuple(spans), path[-1].finish_reason, sampled, images)
