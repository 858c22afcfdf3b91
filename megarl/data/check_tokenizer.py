"""The check of the tokenizer before anything starts: its EOS, and its template with the first prompt of every set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.datasets import all_sets
from megarl.config.schema import Config
from megarl.data.formats import Prompt
from megarl.data.tokenize import PromptEncoder, load_tokenizer, stop_token_ids


def tokenizer_problems(
    config: Config, first: Mapping[str, Prompt], tools: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
) -> list[str]:
    """Return what is wrong with the tokenizer of `model.path`, as `key: what is wrong; how to fix it`.

    `first`: the first prompt of each set by the set's key; a set without one is not tried. `tools`: the
    schemas of the tools that its prompts show, by the same key; none for a set that is not in it.
    """
    try:
        tokenizer = load_tokenizer(config.model.path)
    except ValueError as error:
        return [f"model.path: {error}"]
    problems = []
    try:
        stop_token_ids(config.model.path, tokenizer, config.sampling.stop_token_ids)
    except ValueError as error:
        problems.append(f"sampling.stop_token_ids: {error}")
    whole = "" if getattr(tokenizer, "chat_template", None) else "model.path"  # no set can be encoded
    for each in all_sets(config):
        try:
            kwargs, shown = each.data.chat_template_kwargs, (tools or {}).get(each.key, ())
            encoder = PromptEncoder(tokenizer, template_kwargs=kwargs, tools=shown)
            if each.key in first:
                encoder.encode(first[each.key])
        except ValueError as error:
            problems.append(f"{whole or each.key}: {error}")
        except Exception as error:  # whatever the template's expressions raise
            cause = f"{type(error).__name__}: {error}"
            problems.append(f"{each.key}: the chat template fails with the first prompt: {cause}")
    return list(dict.fromkeys(problems))
