"""Prompt files in JSONL or Parquet: every row is checked when the file is opened, and read again when it is drawn.

Memory holds the line offsets of a JSONL file, or the Arrow table of a Parquet file, but no parsed rows or token ids:
prompts are made on access.
"""

from __future__ import annotations

import json
import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from megarl.chat.formats import Format, Prompt, RowError, detect_format, to_prompt
from megarl.chat.images import check_images, with_images
from megarl.chat.tokenize import PromptEncoder, PromptTooLongError, end_of_turn_ids
from megarl.config.checks.sections import PARQUET_SUFFIXES
from megarl.config.schema.data import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Demonstrations: prompts with a response from the data file, as the token ids that the model would have produced.
#
# The response is the text of `data.demonstration_field`, encoded separately, and the token that ends an assistant's
# turn. It follows the prompt of `PromptEncoder`, including the generation prompt.

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShownResponse:
    """The token ids of a prompt and its response, with the end token."""

    prompt_ids: list[int]
    response_ids: list[int]


class DemonstrationEncoder:
    """Encodes the demonstrations of rows that have one; `prompts` encodes the prompts.

    `max_tokens`: the longest response, including its end; longer ones are treated like overlong prompts. `skipped`:
    how many were left out.
    """

    def __init__(self, prompts: PromptEncoder, end: int, max_tokens: int) -> None:
        self._prompts, self._end, self._max_tokens = prompts, end, max_tokens
        self.skipped = 0

    def encode(self, prompt: Prompt) -> ShownResponse:
        """Return the demonstration of a row. Raises PromptTooLongError if its prompt or response is too long."""
        response = self._prompts.tokenizer(prompt.demonstration, add_special_tokens=False)["input_ids"]
        if len(response) + 1 > self._max_tokens:
            raise PromptTooLongError(
                f"the demonstration of {prompt.name} has {len(response) + 1} tokens, more than "
                f"sampling.max_tokens = {self._max_tokens}; raise it, or set data.overlong_prompts: skip"
            )
        return ShownResponse(self._prompts.encode(prompt), [*response, self._end])

    def valid_indices(self, prompts: Sequence[Prompt], fitting: Sequence[int]) -> Sequence[int]:
        """Return the positions of `fitting` whose demonstration fits. Raises ValueError as for prompts."""
        valid = array("q")
        self.skipped = 0
        for position in fitting:
            prompt = prompts[position]
            try:
                # A token has at least one byte, so most responses need not be encoded.
                if len(prompt.demonstration.encode()) + 1 > self._max_tokens:
                    self.encode(prompt)
                valid.append(position)
            except PromptTooLongError:
                if self._prompts.overlong == "error":
                    raise
                self.skipped += 1
        if not valid:
            raise ValueError(f"all {len(fitting)} demonstrations are longer than {self._max_tokens} tokens; raise it")
        if self.skipped:
            logger.warning("%d of %d demonstrations skipped as too long", self.skipped, len(fitting))
        return valid


def end_token(tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> int:
    """Return the token of `stops` (which end the model's responses) that ends a demonstration.

    Preferably it ends an assistant's turn in the chat template, else it is the tokenizer's EOS, else the lowest.
    """
    wanted = [*sorted(end_of_turn_ids(tokenizer)), tokenizer.eos_token_id, *sorted(stops)]
    return next(int(token) for token in wanted if token in stops)


__all__ = ["Prompt", "PromptDataset", "RowMistake", "has_more_rows", "load_prompts", "row_mistakes"]


RowCheck = Callable[[str, dict[str, Any]], object]
MOST_DECODED = 2_000  # rows whose images are decoded if only the first rows are checked; takes some seconds


class PromptDataset(Sequence[Prompt]):
    """A sequence of prompts with checked rows; access raises ValueError if a JSONL file has changed."""

    def __init__(self, rows: _JsonLines | _Parquet, config: DataConfig, limit: int | None) -> None:
        self.path = rows.path
        self._rows = rows
        self._config = config
        self._format: Format | None = None
        self._length = 0
        for where, read in islice(rows.scan(), limit):
            try:
                self._format = _check_row(self._length, read, self._format, config, self.path)
            except RowError as error:
                raise ValueError(f"{_place(where, error)}: {error}") from error
            self._length += 1
        if self._length == 0:
            raise ValueError(f"{self.path} holds no rows")

    @property
    def format(self) -> Format:
        """The format of the file's rows."""
        assert self._format is not None
        return self._format

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"prompt {index} of {self._length}")
        prompt = to_prompt(position, self._rows.read(position), self.format, self._config)
        return _seen(replace(prompt, where=self._rows.where(position)), self._config, self.path)


def load_prompts(path: Path | str, config: DataConfig, limit: int | None = None) -> PromptDataset:
    """Open a prompt file and check every row, or only the first `limit` rows.

    `config.path` is ignored. Raises ValueError naming file, line (Parquet: row) and field of the first problem.
    """
    return PromptDataset(_open(Path(path)), config, limit)


@dataclass(frozen=True)
class RowMistake:
    """A row that cannot be used; `kind` and `seen` as in RowError.

    `where`: `path:line:column`; `path:line` if the mistake has no single place in the line; in Parquet `path, row N`.
    """

    where: str
    kind: str
    seen: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}{self.seen}"


def row_mistakes(
    path: Path | str, config: DataConfig, limit: int | None = None, check: RowCheck | None = None
) -> Iterator[RowMistake]:
    """Yield what is wrong with the first `limit` rows of a prompt file, or with all, in order.

    Images of all rows are decoded; with a `limit`, of the first `MOST_DECODED`. `check`: the reward's, called with
    (answer, row), raises ValueError. Raises ValueError if the file cannot be opened or holds no rows.
    """
    count = 0
    form: Format | None = None
    for where, read in islice(_open(Path(path)).scan(), limit):
        try:
            decode = limit is None or count < MOST_DECODED
            form = _check_row(count, read, form, config, Path(path), check, decode=decode)
        except RowError as error:
            yield RowMistake(_place(where, error), error.kind, error.seen)
        count += 1
    if count == 0:
        raise ValueError(f"{path} holds no rows")


def has_more_rows(path: Path, limit: int) -> bool:
    """Return whether a prompt file has more than `limit` rows, without parsing any."""
    if path.suffix in PARQUET_SUFFIXES:
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows) > limit
    return next(islice(_JsonLines(path).scan(), limit, None), None) is not None


def _open(path: Path) -> _JsonLines | _Parquet:
    if not path.is_file():
        raise ValueError(f"data file {path} does not exist" if not path.exists() else f"{path} is not a file")
    return _Parquet(path) if path.suffix in PARQUET_SUFFIXES else _JsonLines(path)


def _check_row(
    number: int,
    read: Callable[[], dict[str, Any]],
    form: Format | None,
    config: DataConfig,
    path: Path,
    check: RowCheck | None = None,
    *,
    decode: bool = False,
) -> Format:
    """Return the format of the file, that of its first readable row. Raises RowError."""
    row = read()
    form = form or detect_format(row, config)
    prompt = _seen(to_prompt(number, row, form, config), config, path)
    check_images(prompt, config.images_field, decode=decode)
    try:
        if check is not None:
            check(prompt.answer, prompt.row)
    except ValueError as error:
        raise RowError("the reward cannot use it", f": {error}") from error
    return form


def _seen(prompt: Prompt, config: DataConfig, path: Path) -> Prompt:
    """Return a prompt of the data file `path` with its images."""
    return with_images(prompt, config.images_field, path.parent)


def _place(where: str, error: RowError) -> str:
    return where if error.column is None else f"{where}:{error.column}"


class _JsonLines:
    """A JSONL file, read by byte offsets. Blank lines are skipped; line numbers count them and start at 1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = array("Q")
        self._blanks = array("Q")  # for each blank line, the number of rows before it
        self._stamp = _stamp(path)

    def scan(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yield (`path:line`, a function that reads the row) for every row, and record its offset."""
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._offsets.append(offset)
                    yield f"{self.path}:{number}", partial(_parse, line)
                else:
                    self._blanks.append(len(self._offsets))
                offset += len(line)

    def where(self, position: int) -> str:
        """Return `path:line` of a scanned row."""
        return f"{self.path}:{position + 1 + bisect_right(self._blanks, position)}"

    def read(self, position: int) -> dict[str, Any]:
        """Return a scanned row by position (from 0). Raises ValueError if the file has changed."""
        if _stamp(self.path) != self._stamp:
            raise ValueError(f"{self.path} has changed since the run started")
        with self.path.open("rb") as file:
            file.seek(self._offsets[position])
            line = file.readline()
        try:
            return _parse(line)
        except RowError as error:
            raise ValueError(f"{self.where(position)}: {error}") from error


class _Parquet:
    """A Parquet file, held as an Arrow table. Raises ValueError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            self._table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is not a readable Parquet file: {error}") from error

    def scan(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yield (`path, row N`, a function that returns the row) for every row; N counts from 1."""
        number = 0
        for batch in self._table.to_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{self.path}, row {number}", partial(_without_nulls, row)

    def where(self, position: int) -> str:
        """Return `path, row N` of a row."""
        return f"{self.path}, row {position + 1}"

    def read(self, position: int) -> dict[str, Any]:
        """Return a row by position (from 0)."""
        (row,) = self._table.slice(position, 1).to_pylist()
        return _without_nulls(row)


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls that Arrow adds to calls for the arguments of other calls."""
    return {name: _own(value) if isinstance(value, list) else value for name, value in row.items()}


def _own(value: Any) -> Any:  # noqa: ANN401 (any value of a row)
    if isinstance(value, dict):
        return {key: _own(each) for key, each in value.items() if each is not None}
    return [_own(each) for each in value] if isinstance(value, list) else value


def _stamp(path: Path) -> tuple[int, int]:
    """Return (size in bytes, modification time in ns), to detect changes of the file."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig"))  # a line end could shift the column to the next line
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode()  # without a byte order mark
        raise RowError("not UTF-8", f" at byte {error.start} of the line", len(before) + 1) from error
    except json.JSONDecodeError as error:
        hint = "; write one JSON object per line, not one array" if line.strip() == b"[" else ""
        raise RowError(f"not JSON: {error.msg}{hint}", column=error.colno) from error
    except (ValueError, RecursionError) as error:  # a number with too many digits, or nesting too deep
        raise RowError("not JSON that can be read", f": {error}") from error
    if not isinstance(row, dict):
        raise RowError(f"must be a JSON object, not {type(row).__name__}")
    return row
