"""The check of the tokenizer before anything starts: its EOS, its template with the prompts of every set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from megarl.chat.formats import Prompt
from megarl.chat.tokenize import PromptEncoder, PromptTooLongError, load_tokenizer, stop_token_ids
from megarl.common.errors import Findings
from megarl.config.checks.sections import evaluation_prompt_limit, prompt_limit
from megarl.config.derived.datasets import HeldOutSet, TrainSet, all_sets
from megarl.config.schema import Config
from megarl.data.check_lengths import length_notes
from megarl.models.architecture.architecture import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_findings(
    config: Config,
    info: ModelInfo,
    first: Mapping[str, Prompt],
    tools: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    *,
    whole: bool = False,
) -> Findings:
    """Find what is wrong with the tokenizer of `model.path`, and with the lengths of the prompts.

    `first`: the first prompt of each set by the set's key; a set without one is not tried. `tools`: the
    schemas of the tools that its prompts show, by the same key; none for a set that is not in it. `whole`: all prompts
    are measured, not only the first ones of a large file.
    """
    try:
        tokenizer = load_tokenizer(config.model.path)
    except ValueError as error:
        return Findings([f"model.path: {error}"])
    found = Findings()
    stops: list[int] = []
    try:
        stops = stop_token_ids(config.model.path, tokenizer, config.sampling.stop_token_ids)
    except ValueError as error:
        found.problems.append(f"sampling.stop_token_ids: {error}")
    no_set = "" if getattr(tokenizer, "chat_template", None) else "model.path"  # none can be encoded
    for each in all_sets(config):
        try:
            encoder = _encoder(config, info, tokenizer, each, (tools or {}).get(each.key, ()))
            if each.key in first:
                with suppress(PromptTooLongError):  # which is no mistake if such prompts are skipped
                    encoder.encode(first[each.key])
                found.notes += length_notes(each, encoder, stops, whole=whole)
        except ValueError as error:
            found.add(Findings([f"{no_set or each.key}: {error}"]))
        except Exception as error:  # whatever the template's expressions raise
            cause = f"{type(error).__name__}: {error}"
            found.add(Findings([f"{each.key}: the chat template fails with the first prompt: {cause}"]))
    return found


def _encoder(
    config: Config,
    info: ModelInfo,
    tokenizer: PreTrainedTokenizerBase,
    chosen: TrainSet | HeldOutSet,
    tools: Sequence[Mapping[str, Any]],
) -> PromptEncoder:
    """Return the encoder that the run will have for a set."""
    if isinstance(chosen, TrainSet):
        limit, overlong = prompt_limit(config, info, chosen.sampling.max_tokens), chosen.data.overlong_prompts
    else:  # a score without the longest problems would be of another set
        limit, overlong = evaluation_prompt_limit(config, info), "error"
    return PromptEncoder(
        tokenizer,
        limit.tokens,
        overlong,
        limit.setting,
        template_kwargs=chosen.data.chat_template_kwargs,
        tools=tools,
    )
