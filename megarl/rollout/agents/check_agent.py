"""The trial of the agent before anything starts: its loop, every tool, and the chat template with the tools."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass
class AgentTrial:
    """Holds what a trial has found.

    `problems`: as `key: what is wrong`; `schemas`: those of each set's tools by the set's key.
    """

    problems: list[str] = field(default_factory=list)
    schemas: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def try_agent(config: Config) -> AgentTrial:
    """Make the loop, the tools and the toolboxes that the run will make, and end the tools; nothing is called.

    A tool that cannot be made is told once, and its sets are tried with their other tools. What is wrong with the
    tokenizer itself is left to `tokenizer_findings`.
    """
    trial = AgentTrial()
    if config.agent.loop == SINGLE_TURN:
        return trial
    if (here := os.getcwd()) not in sys.path:  # where the pool finds agents and tools too
        sys.path.append(here)
    try:
        find_loop(config.agent)
    except ValueError as error:
        told = str(error)
        trial.problems.append(told if told.startswith("agent.") else f"agent.loop: {told}")
    made: list[tuple[ToolConfig, Tool]] = []
    try:
        trial.problems += _make_tools(config, made)
        tokenizer = _tokenizer(config.model.path, config.sampling.stop_token_ids)
        for each in all_sets(config):
            tools = [tool for chosen in each.tools for own, tool in made if own == chosen]
            trial.schemas[each.key] = [schema_of(tool) for tool in tools]
            try:
                if tokenizer is not None:
                    make_toolbox(config.agent, each, tools, *tokenizer)
            except ValueError as error:
                trial.problems.append(f"{each.key}: {error}")
    finally:
        asyncio.run(close_tools([tool for _, tool in made]))
    return trial


def _make_tools(config: Config, made: list[tuple[ToolConfig, Tool]]) -> list[str]:
    """Add each tool that a set has to `made` once; return the problems of those that cannot be made."""
    used = [tool for each in all_sets(config) for tool in each.tools]
    problems, tried = [], []
    for key, chosen in tool_lists(config).items():
        for index, tool in enumerate(chosen):
            if tool in tried or tool not in used:
                continue
            tried.append(tool)
            try:
                made.append((tool, make_tool(tool, f"{key}.{index}")))
            except ValueError as error:
                problems.append(str(error))
    return problems


def _tokenizer(model: Path, own_stops: Sequence[int] | None) -> tuple[PreTrainedTokenizerBase, list[int]] | None:
    """Return the tokenizer and its stop tokens; None if one of them, or the chat template, cannot be had."""
    try:
        tokenizer = load_tokenizer(model)
        stops = stop_token_ids(model, tokenizer, own_stops)
    except ValueError:
        return None
    return (tokenizer, stops) if getattr(tokenizer, "chat_template", None) else None
