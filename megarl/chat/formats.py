"""Converts a row of a data file to chat messages and a reference answer. Pure functions, one branch per format."""

import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.config.schema.data import DataConfig
from megarl.queue.images import IMAGE_MARK

Message = dict[str, Any]  # role, content, and OpenAI's fields of tool calls
Format = Literal["gsm8k", "problem_answer", "messages", "verl", "fields"]
VERL_ANSWER = "reward_model.ground_truth"
_PROMPT_FIELDS = {"gsm8k": "question", "problem_answer": "problem", "messages": "messages", "verl": "prompt"}
ROLES = ("system", "user", "assistant", "tool")
ImageSource = bytes | Path  # the content of an image file, or where it is


class RowError(ValueError):
    """An unusable row; the caller adds file and line to the message.

    Attributes:
        kind: what is wrong, worded the same for all rows of a file with this mistake.
        seen: what this row has instead, the rest of the message.
        column: the place in the line, in characters from 1; None if the mistake has no single place.
    """

    def __init__(self, kind: str, seen: str = "", column: int | None = None) -> None:
        super().__init__(kind + seen)
        self.kind, self.seen, self.column = kind, seen, column


@dataclass(frozen=True)
class Prompt:
    """A problem; `index`: its number among the file's rows; `row`: all fields of the row, unchanged.

    `where`: its place, as `path:line` or `path, row N`; "" if it is not from a file. `demonstration`: the response to
    learn; "" if the model answers itself. `tools`: schemas of the row's tools, which the prompt shows instead of the
    run's. `images`: one per image mark.
    """

    index: int
    messages: list[Message]
    answer: str
    row: dict[str, Any]
    demonstration: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    where: str = ""
    images: tuple[ImageSource, ...] = ()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.where or f"prompt {self.index}"

    @property
    def text(self) -> str:
        """The content of the last user message, as the model sees it."""
        text: str = next(m["content"] for m in reversed(self.messages) if m["role"] == "user")
        return text


def detect_format(row: dict[str, Any], config: DataConfig) -> Format:
    """Return the format of a file, by its first row. Raises RowError with the settings to change if none fits."""
    if config.format != "auto":
        return config.format
    defaults = DataConfig.model_fields
    renamed = (config.prompt_field, config.answer_field) != (
        defaults["prompt_field"].default,
        defaults["answer_field"].default,
    )
    if not renamed and isinstance(row.get("question"), str) and "####" in str(row.get("answer", "")):
        return "gsm8k"
    if not renamed and "problem" in row and ("answer" in row or config.demonstration_field):
        return "problem_answer"
    if _lookup(row, config.prompt_field) is not None:
        verl = not renamed and "answer" not in row and _lookup(row, VERL_ANSWER) is not None
        return "verl" if verl else "fields"
    if not renamed and "messages" in row:
        return "messages"
    if renamed:  # by the keys that have another value than the default
        raise RowError(
            f"there is no field {config.prompt_field!r} (data.prompt_field); with data.prompt_field or "
            "data.answer_field changed no other format is recognized: correct data.prompt_field, or set data.format",
            _fields(row, config.prompt_field),
        )
    raise RowError(
        "unknown format: there are neither question/answer with '####' (gsm8k) nor problem/answer, nor a field "
        f"{config.prompt_field!r} or messages; set data.prompt_field and data.answer_field",
        _fields(row),
    )


def to_prompt(index: int, row: dict[str, Any], kind: Format, config: DataConfig) -> Prompt:
    """Return the prompt of a row in format `kind`. Raises RowError naming a missing field or one of a wrong type.

    With `demonstration_field` nothing is scored, so the row needs no reference answer.
    """
    field = _PROMPT_FIELDS.get(kind, config.prompt_field)
    given = _text(row, field) if kind in ("gsm8k", "problem_answer") else _required(row, field)
    messages, tools = _messages(given, field, config), _own_tools(row, config.tools_field)
    if config.demonstration_field:
        return Prompt(index, messages, "", row, _text(row, config.demonstration_field), tools)
    if kind == "gsm8k":
        answer = _text(row, "answer")
        reference = answer.rpartition("####")[2].strip()
        if "####" not in answer or not reference:
            raise RowError("field 'answer' has no number after '####', as GSM8K's answers have")
        return Prompt(index, messages, reference, row, tools=tools)
    answer_field = {"problem_answer": "answer", "verl": VERL_ANSWER}.get(kind, config.answer_field)
    return Prompt(index, messages, _answer(row, answer_field), row, tools=tools)


def _own_tools(row: dict[str, Any], field: str | None) -> tuple[dict[str, Any], ...]:
    """Return the schemas of a row's tools, which may be JSON text. Raises RowError, also for unused tools."""
    given = row.get(field or "tools")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            if field is None:
                return ()  # a text column that only shares the name
            raise RowError(f"field {field!r} must be a list of tools, or its JSON text", f": {error}") from error
    schemas = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    described = [each for each in schemas if isinstance((each.get("function") or {}).get("name"), str)]
    if field is None:
        if described:
            raise RowError(
                "the row has its own `tools`; set data.tools_field: tools, which shows them to the model, or remove "
                "the column"
            )
        return ()
    if given is not None and (not isinstance(given, list) or len(described) < len(given)):
        raise RowError(f"field {field!r} must be a list of tools with function.name", f", not {given!r:.60}")
    return tuple(described)


def _lookup(row: dict[str, Any], field: str) -> object:
    """Return a field, or a nested one by dotted path (`reward_model.ground_truth`); None if there is none."""
    if field in row:
        return row[field]
    value: object = row
    for part in field.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def _required(row: dict[str, Any], field: str) -> object:
    value = _lookup(row, field)
    if value is None:
        if field in row:
            raise RowError(f"field {field!r} is null")
        raise RowError(f"field {field!r} is missing", _fields(row, field))
    return value


def _fields(row: dict[str, Any], field: str = "") -> str:
    close = difflib.get_close_matches(field, row, n=1)
    return f"; the row has {sorted(row)}" + (f"; did you mean {close[0]!r}?" if close else "")


def _text(row: dict[str, Any], field: str) -> str:
    value = _required(row, field)
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"field {field!r} must be a non-empty string", f", not {value!r:.60}")
    return value


def _answer(row: dict[str, Any], field: str) -> str:
    value = _required(row, field)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"field {field!r} must be a string or a number", f", not {value!r:.60}")
    if isinstance(value, float) and not math.isfinite(value):  # pandas writes NaN for missing values
        raise RowError(f"field {field!r} is not a number", f", but {value}")
    return str(value)


def _messages(content: object, field: str, config: DataConfig) -> list[Message]:
    raw = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not isinstance(raw, list) or not raw:
        raise RowError(f"field {field!r} must be a string or a list of messages", f", not {content!r:.60}")
    messages = [_message(_marked(message) if config.images_field else message, field) for message in raw]
    if messages[-1]["role"] not in ("user", "tool") or all(m["role"] != "user" for m in messages):
        raise RowError(f"field {field!r} must hold a user message, and its last message must be a user's or a tool's")
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise RowError(f"field {field!r} has its own system message; remove data.system_prompt")
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    if config.suffix:
        messages = [{**m, "content": m["content"] + config.suffix} if m["role"] == "user" else m for m in messages]
    return messages


def _marked(message: object) -> object:
    """Return a message with its content parts joined to text, with a mark for each image."""
    if not isinstance(message, dict) or not isinstance(parts := message.get("content"), list):
        return message
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image") or (kind == "text" and not isinstance(part.get("text"), str)):
            raise RowError("a part of a message must be {type: text, text} or {type: image}", f", not {part!r:.60}")
        if kind == "image" and any(part.get(name) is not None for name in part if name not in ("type", "text")):
            raise RowError("a part of type image takes its image from data.images_field", f", and has {part!r:.60}")
        texts.append(part["text"] if kind == "text" else IMAGE_MARK)
    return {**message, "content": "".join(texts)}


def _message(message: object, field: str) -> Message:
    if isinstance(message, dict):  # Parquet adds the fields of other rows as None
        message = {key: value for key, value in message.items() if value is not None}
    if not isinstance(message, dict) or "role" not in message or not ({"content", "tool_calls"} & set(message)):
        raise RowError(f"field {field!r}: a message must have role and content", f": {message!r:.60}")
    role = message["role"]
    if role not in ROLES:
        raise RowError(f"field {field!r}: a role must be one of {', '.join(ROLES)}", f", not {role!r:.60}")
    own = {"role", "content", *_OWN_FIELDS.get(role, ())}
    if unknown := sorted(set(message) - own):
        kind = f"field {field!r}: a message has a field that its role does not have"
        raise RowError(kind, f": role {role}, no field {unknown[0]!r:.60}: {message!r:.60}")
    content = message.get("content", "")
    if not isinstance(content, str) or not (content.strip() or role == "tool" or message.get("tool_calls")):
        raise RowError(f"field {field!r}: content must be a non-empty string", f", not {content!r:.60}")
    checked = {**message, "content": content}
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise RowError(f"field {field!r}: tool_calls must be a list", f", not {calls!r:.60}")
        checked["tool_calls"] = [_called(call, field) for call in calls]
    return checked


_OWN_FIELDS = {"assistant": ("tool_calls",), "tool": ("name", "tool_call_id")}


def _called(call: object, field: str) -> Message:
    """Return a call in the form for chat templates. Its arguments may be JSON text, as in OpenAI's API and Parquet."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(arguments, dict):
        raise RowError(f"field {field!r}: a call must have function.name and function.arguments", f": {call!r:.60}")
    if not isinstance(function.get("name"), str):
        raise RowError(f"field {field!r}: a call must have function.name, a string", f": {call!r:.60}")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
