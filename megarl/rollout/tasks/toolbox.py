"""The toolboxes of a run's data sets, each shared by the agent loops of a set. Sets with equal tools share these."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.chat.dialogue import Dialogue
from megarl.chat.images import PromptImages
from megarl.chat.tool_calls import HERMES, ToolFormat
from megarl.chat.tool_format import tool_format
from megarl.common.imports import imported
from megarl.common.process.child_process import StartError
from megarl.common.trust.secret_references import resolved
from megarl.config.derived.datasets import HeldOutSet, TrainSet
from megarl.config.schema.agent import SHIPPED_TOOLS, SINGLE_TURN, TOOL_AGENT, AgentConfig, ToolConfig
from megarl.sandbox.limits import Limits, SandboxError
from megarl.tools.http_tool import HttpTool
from megarl.tools.process_tool import class_tool, function_tool
from megarl.tools.process_worker import made
from megarl.tools.python_tool import PythonTool
from megarl.tools.tool import Tool, schema_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

CLOSE_S = 10.0  # time limit for closing all tools
_KEPT_REFERENCES = {"http": {"token"}}  # arguments that the tool resolves itself, at each call
LEFT_OUT = "{left_out}"  # in the note


@dataclass(frozen=True)
class Toolbox:
    """The tools of a data set by name, and what a loop needs to offer them to the model.

    `run_dir`: the run's directory, which has the address of the gateway; None if the run has no gateway.
    `max_model_len`: tokens of prompt and response together; None if unknown. `images`: how images are shown; None
    without vision.
    """

    dialogue: Dialogue
    bounds: AgentConfig
    tools: Mapping[str, Tool]
    tool_format: ToolFormat = HERMES
    run_dir: Path | None = None
    max_model_len: int | None = None
    images: PromptImages | None = None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' schemas, as chat templates and OpenAI's API take them."""
        return [schema_of(tool) for tool in self.tools.values()]

    def shortened(self, text: str) -> str:
        """Return a tool's answer as encodable text, cut to `agent.max_tool_output_chars` plus a note about the cut."""
        text = text.encode(errors="replace").decode()  # a tokenizer refuses half a surrogate pair
        most = self.bounds.max_tool_output_chars
        if len(text) <= most:
            return text
        begin = {"beginning": 0, "middle": most - most // 2, "end": most}[self.bounds.tool_output_cut]
        note = self.bounds.tool_output_note.replace(LEFT_OUT, str(len(text) - most))
        return text[:begin] + note + text[len(text) - (most - begin) :]


class Toolboxes:
    """Makes a toolbox for each data set (None for single-turn runs), and closes all tools."""

    def __init__(
        self, agent: AgentConfig, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int],
        max_model_len: int | None = None, run_dir: Path | None = None, images: PromptImages | None = None,
    ) -> None:  # fmt: skip
        """`max_model_len`: the engines', if known. `run_dir`, `images`: see `Toolbox`."""
        self._agent, self._tokenizer, self._stops = agent, tokenizer, stop_token_ids
        self._max_model_len, self._run_dir, self._images = max_model_len, run_dir, images
        self._made: dict[str, Tool] = {}

    def of(self, chosen: TrainSet | HeldOutSet) -> Toolbox | None:
        """Return the toolbox of a set. Raises ValueError for unusable tools, or an unusable chat template."""
        if self._agent.loop == SINGLE_TURN:
            return None
        tools = [self._tool(tool, f"{chosen.key}.tools.{index}") for index, tool in enumerate(chosen.tools)]
        made = make_toolbox(
            self._agent, chosen, tools, self._tokenizer, self._stops, self._max_model_len, self._run_dir
        )
        return replace(made, images=self._images)

    def _tool(self, chosen: ToolConfig, key: str) -> Tool:
        same = chosen.model_dump_json()
        if same not in self._made:
            self._made[same] = make_tool(chosen, key)
        return self._made[same]

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """See `close_tools`."""
        made, self._made = list(self._made.values()), {}
        await close_tools(made, timeout_s)


async def close_tools(made: Sequence[Tool], timeout_s: float = CLOSE_S) -> None:
    """End the processes and connections of all tools; log those that fail or take longer."""
    closing = [asyncio.ensure_future(tool.close()) for tool in made]
    if not closing:
        return
    _, late = await asyncio.wait(closing, timeout=timeout_s)
    for tool, ended in zip(made, closing, strict=True):
        if ended in late:
            ended.cancel()
            logger.error("the tool %s did not close within %.0f s", tool.name, timeout_s)
        elif (error := ended.exception()) is not None:
            logger.error("the tool %s did not close: %s: %s", tool.name, type(error).__name__, error)


def make_toolbox(
    agent: AgentConfig,
    chosen: TrainSet | HeldOutSet,
    tools: Sequence[Tool],
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    max_model_len: int | None = None,
    run_dir: Path | None = None,
) -> Toolbox:
    """Return the toolbox of a set with these tools.

    Raises ValueError if two have the same name, or if the chat template cannot be used with them.
    """
    names = [tool.name for tool in tools]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several tools are called {repeated[0]!r}; give all but one another `name`")
    kwargs = chosen.data.chat_template_kwargs
    dialogue = Dialogue(tokenizer, stop_token_ids, kwargs)
    if agent.loop == TOOL_AGENT:
        dialogue.check(tools=bool(tools))
    form = tool_format(agent.tool_format, tokenizer, kwargs) if tools else HERMES
    return Toolbox(dialogue, agent, dict(zip(names, tools, strict=True)), form, run_dir, max_model_len)


def make_tool(chosen: ToolConfig, key: str) -> Tool:
    """Return the tool of a config. Raises ValueError, naming the `key`, for one that cannot be made."""
    try:
        if chosen.in_worker:
            return _in_worker(chosen, key)
        if chosen.kind in SHIPPED_TOOLS:
            kept = {name for name in _KEPT_REFERENCES.get(chosen.kind, ()) if name in chosen.kwargs}
            others = {name: value for name, value in chosen.kwargs.items() if name not in kept}
            kwargs = {**resolved(others, f"{key}.kwargs"), **{name: chosen.kwargs[name] for name in kept}}
            return _shipped(chosen, kwargs)
        found = imported(chosen.kind, "the tool")
        if not inspect.isclass(found):
            return function_tool(chosen.kind, name=chosen.name, **resolved(chosen.kwargs, f"{key}.kwargs"))
        return class_tool(chosen.kind, name=chosen.name, kwargs=resolved(chosen.kwargs, f"{key}.kwargs"))
    except (TypeError, ValueError, TimeoutError, StartError, SandboxError) as error:
        raise ValueError(f"{key}: {chosen.kind!r} cannot be made: {error}") from error
    except Exception as error:  # from the values of its arguments
        raise ValueError(f"{key}: {chosen.kind!r} cannot be made: {type(error).__name__}: {error}") from error


def _shipped(chosen: ToolConfig, kwargs: Mapping[str, Any]) -> Tool:
    """Return one of megarl's tools. `python` takes the arguments of `PythonTool` and the fields of `Limits`."""
    named: dict[str, Any] = {} if chosen.name is None else {"name": chosen.name}
    if chosen.kind == "http":
        return HttpTool(**named, **kwargs)
    names = {each.name for each in fields(Limits)}
    limits = Limits(**{name: value for name, value in kwargs.items() if name in names})
    return PythonTool(limits=limits, **named, **{name: kwargs[name] for name in kwargs.keys() - names})


def _in_worker(chosen: ToolConfig, key: str) -> Tool:
    """Return an object of a tool's class in this process."""
    if chosen.kind in SHIPPED_TOOLS or not inspect.isclass(imported(chosen.kind, "the tool")):
        raise ValueError("in_worker is for tools that are classes: remove it")
    return made(chosen.kind, chosen.name, resolved(chosen.kwargs, f"{key}.kwargs"))
