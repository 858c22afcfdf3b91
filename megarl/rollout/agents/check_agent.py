"""Tries the agent before anything starts: its loop, every tool, and the chat template with the tools."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.chat.tokenize import load_tokenizer, stop_token_ids
from megarl.config.checks.agent import tool_lists
from megarl.config.derived.datasets import all_sets
from megarl.config.schema import Config
from megarl.config.schema.agent import SINGLE_TURN, ToolConfig
from megarl.rollout.agents.loop_host import find_loop
from megarl.rollout.tasks.toolbox import close_tools, make_tool, make_toolbox
from megarl.tools.tool import Tool, schema_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def try_agent(config: Config) -> tuple[list[str], dict[str, list[dict[str, Any]]]]:
    """Make the loop, tools and toolboxes of the run without calling any tool, then close the tools.

    Return the problems, as `key: what is wrong`, and the schemas of each set's tools by the set's key. A tool that
    cannot be made is reported once, and its sets are tried with their other tools. Problems of the tokenizer itself are
    left to `tokenizer_findings`.
    """
    problems: list[str] = []
    schemas: dict[str, list[dict[str, Any]]] = {}
    if config.agent.loop == SINGLE_TURN:
        return problems, schemas
    if (here := os.getcwd()) not in sys.path:  # the pool also finds agents and tools here
        sys.path.append(here)
    try:
        find_loop(config.agent)
    except ValueError as error:
        message = str(error)
        problems.append(message if message.startswith("agent.") else f"agent.loop: {message}")
    made: list[tuple[ToolConfig, Tool]] = []
    try:
        sets = all_sets(config)
        used = [tool for each in sets for tool in each.tools]
        tried: list[ToolConfig] = []
        for key, chosen in tool_lists(config).items():
            for index, own in enumerate(chosen):
                if own in used and own not in tried:
                    tried.append(own)
                    try:
                        made.append((own, make_tool(own, f"{key}.{index}")))
                    except ValueError as error:
                        problems.append(str(error))
        tokenizer = _tokenizer(config.model.path, config.sampling.stop_token_ids)
        for each in sets:
            tools = [tool for chosen in each.tools for own, tool in made if own == chosen]
            schemas[each.key] = [schema_of(tool) for tool in tools]
            try:
                if tokenizer is not None:
                    make_toolbox(config.agent, each, tools, *tokenizer)
            except ValueError as error:
                problems.append(f"{each.key}: {error}")
    finally:
        asyncio.run(close_tools([tool for _, tool in made]))
    return problems, schemas


def _tokenizer(model: Path, own_stops: Sequence[int] | None) -> tuple[PreTrainedTokenizerBase, list[int]] | None:
    """Return the tokenizer and its stop tokens; None if one of them, or the chat template, is missing."""
    try:
        tokenizer = load_tokenizer(model)
        stops = stop_token_ids(model, tokenizer, own_stops)
    except ValueError:
        return None
    return (tokenizer, stops) if getattr(tokenizer, "chat_template", None) else None
