"""The things that agent loops of one data set share: its tools, its dialogues, the bounds of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.chat.dialogue import Dialogue
from megarl.chat.tool_calls import HERMES, ToolFormat
from megarl.config.schema.agent import AgentConfig
from megarl.tools.tool import Tool, schema_of

LEFT_OUT = "{left_out}"  # in the note


@dataclass(frozen=True)
class Toolbox:
    """The tools of a data set by name, and what a loop needs to talk with the model about them.

    `run_dir`: the directory of the run, where the address of its gateway is; None if the loop does not act through it.
    `max_model_len`: tokens of prompt and response together; None if it is not known.
    """

    dialogue: Dialogue
    bounds: AgentConfig
    tools: Mapping[str, Tool]
    tool_format: ToolFormat = HERMES
    run_dir: Path | None = None
    max_model_len: int | None = None

    @classmethod
    def of(
        cls, dialogue: Dialogue, bounds: AgentConfig, tools: Sequence[Tool], tool_format: ToolFormat,
        run_dir: Path | None = None, max_model_len: int | None = None,
    ) -> Toolbox:  # fmt: skip
        """Return the box of these tools. Raises ValueError if two have the same name."""
        names = [tool.name for tool in tools]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several tools are called {repeated[0]!r}; give all but one a `name` of their own")
        by_name = dict(zip(names, tools, strict=True))
        return cls(dialogue, bounds, by_name, tool_format, run_dir, max_model_len)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates and OpenAI's API take them."""
        return [schema_of(tool) for tool in self.tools.values()]

    def shortened(self, text: str) -> str:
        """Return a tool's answer within `agent.max_tool_output_chars`, cut as the config says, as encodable text.

        The note about what is left out comes on top.
        """
        text = text.encode(errors="replace").decode()  # a tokenizer refuses half a surrogate pair
        most = self.bounds.max_tool_output_chars
        if len(text) <= most:
            return text
        begin = {"beginning": 0, "middle": most - most // 2, "end": most}[self.bounds.tool_output_cut]
        note = self.bounds.tool_output_note.replace(LEFT_OUT, str(len(text) - most))
        return text[:begin] + note + text[len(text) - (most - begin) :]
