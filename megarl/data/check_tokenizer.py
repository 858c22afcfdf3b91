"""Checks the tokenizer before anything starts: EOS, chat template with the prompts of every set, prompt lengths."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from megarl.chat.formats import Prompt
from megarl.chat.images import PromptImages
from megarl.chat.tokenize import PromptEncoder, PromptTooLongError, load_tokenizer, stop_token_ids
from megarl.common.errors import FIRST_PROMPT, Findings
from megarl.config.checks.sections import evaluation_prompt_limit, prompt_limit
from megarl.config.derived.datasets import HeldOutSet, TrainSet, all_sets
from megarl.config.schema import Config
from megarl.data.check_files import most_rows
from megarl.data.dataset import DemonstrationEncoder, end_token, load_prompts
from megarl.models.architecture.architecture import ModelInfo

SHOWN_CHARACTERS = 600  # of each end of the first prompt
MOST_MEASURED = 10_000  # prompts whose exact length is shown; takes some seconds
MOST_CHARACTERS = 10_000_000  # of a set; takes some seconds to tokenize; the run measures all


def tokenizer_findings(
    config: Config,
    info: ModelInfo,
    first: Mapping[str, Prompt],
    tools: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    *,
    whole: bool = False,
) -> Findings:
    """Find what is wrong with the tokenizer of `model.path`, and with the lengths of the prompts.

    `first`: the first prompt of each set by the set's key; other sets are not tried. `tools`: schemas of the tools in a
    set's prompts, by the same key. `whole`: measure all prompts, not only the first ones of a large file.
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
    try:
        images = PromptImages.of(config.model.path, info, config.model.vision)
    except ValueError as error:
        return Findings([f"model.path: {error}"])
    no_set = "" if getattr(tokenizer, "chat_template", None) else "model.path"  # none can be encoded
    for each in all_sets(config):
        try:
            if isinstance(each, TrainSet):
                limit, overlong = prompt_limit(config, info, each.sampling.max_tokens), each.data.overlong_prompts
            else:  # skipping the longest problems would change the score
                limit, overlong = evaluation_prompt_limit(config, info), "error"
            encoder = PromptEncoder(
                tokenizer,
                limit.tokens,
                overlong,
                limit.setting,
                limit.fix,
                template_kwargs=each.data.chat_template_kwargs,
                tools=(tools or {}).get(each.key, ()),
                images=images,
            )
            if each.key in first:
                with suppress(PromptTooLongError):  # no mistake if such prompts are skipped
                    encoder.encode(first[each.key])
                found.add(length_findings(each, encoder, stops, whole=whole))
                found.seen += _rendered(each, encoder, first[each.key])
        except ValueError as error:
            found.add(Findings([f"{no_set or each.key}: {error}"]))
    return found


def length_findings(
    chosen: TrainSet | HeldOutSet, encoder: PromptEncoder, stops: Sequence[int], *, whole: bool
) -> Findings:
    """Measure the prompts of a set by the run's rules; return what a dry run shows of them.

    `encoder`: the run's for this set; `stops`: tokens that end a response, [] if unknown. Without `whole` only a large
    file's first prompts are measured. Raises ValueError if the run would refuse the set.
    """
    most = most_rows(chosen, whole=whole)
    try:
        prompts = load_prompts(chosen.path, chosen.data, most)
        rows = len(prompts)
        if not whole and (count := _affordable(prompts)) < rows:
            prompts = load_prompts(chosen.path, chosen.data, count)
    except (ValueError, OSError):  # reported by `data_file_findings`
        return Findings()
    some = len(prompts) < rows or rows == most
    skipped = _skipped(chosen, encoder, prompts, stops, some=some)
    notes = []
    if 0 < (empty := sum(not each.answer.strip() for each in prompts)) < len(prompts):
        notes.append(f"{chosen.key}: {empty:,} of {len(prompts):,} rows have an empty answer, which a reward may take")
    if len(prompts) < rows:
        measured = f"the lengths of the first {len(prompts):,} prompts were checked"
        notes.append(f"{chosen.key}: {measured}; megarl plan --all-mistakes measures all")
    if skipped:
        of = f"{'the first ' if some else ''}{len(prompts):,} prompts"
        notes.append(f"{chosen.key}: {skipped:,} of {of} are too long, and left out (data.overlong_prompts: skip)")
    return Findings(notes=notes, seen=[(chosen.key, _lengths(chosen, encoder, prompts, some=some))])


def _lengths(chosen: TrainSet | HeldOutSet, encoder: PromptEncoder, prompts: Sequence[Prompt], *, some: bool) -> str:
    """Return how many prompts a set has, and the shortest, median and longest length in tokens."""
    measured = sorted(len(encoder.ids(prompts[n])) for n in range(min(len(prompts), MOST_MEASURED)))
    of = "" if len(measured) == len(prompts) and not some else f" of the first {len(measured):,}"
    count = f"{'at least ' if some else ''}{len(prompts):,} prompts"
    shortest, median, longest = measured[0], measured[len(measured) // 2], measured[-1]
    return f"{count} of {chosen.path}; tokens{of}: {shortest} shortest, {median} median, {longest} longest"


def _rendered(chosen: TrainSet | HeldOutSet, encoder: PromptEncoder, prompt: Prompt) -> list[tuple[str, str]]:
    """Return the text of a training set's first prompt, without its middle if it is long."""
    if isinstance(chosen, HeldOutSet):
        return []
    text = encoder.render(prompt)
    if len(text) > 2 * SHOWN_CHARACTERS:
        left_out = f"\n[... {len(text) - 2 * SHOWN_CHARACTERS:,} characters ...]\n"
        text = text[:SHOWN_CHARACTERS] + left_out + text[-SHOWN_CHARACTERS:]
    return [(f"{FIRST_PROMPT} of {chosen.name}" if chosen.name else FIRST_PROMPT, text)]


def _affordable(prompts: Sequence[Prompt]) -> int:
    """Return how many of the first prompts have at most MOST_CHARACTERS together; at least 1."""
    characters = 0
    for count, prompt in enumerate(prompts):
        characters += sum(len(str(message.get("content"))) for message in prompt.messages) + len(prompt.demonstration)
        if characters > MOST_CHARACTERS:
            return max(1, count)
    return len(prompts)


def _skipped(
    chosen: TrainSet | HeldOutSet,
    encoder: PromptEncoder,
    prompts: Sequence[Prompt],
    stops: Sequence[int],
    *,
    some: bool,
) -> int:
    """Return how many prompts the run will skip. Raises ValueError if it will refuse the set.

    `some`: the set may have more prompts, of which some may fit.
    """
    shown: DemonstrationEncoder | None = None
    valid: Sequence[int] = ()
    try:
        with _quiet():
            valid = encoder.valid_indices(prompts)
            if isinstance(chosen, TrainSet) and chosen.demonstrates and stops:
                end = end_token(encoder.tokenizer, stops)
                shown = DemonstrationEncoder(encoder, end, chosen.sampling.max_tokens)
                shown.valid_indices(prompts, valid)
    except ValueError:
        all_left_out = encoder.skipped == len(prompts) or (shown is not None and shown.skipped == len(valid))
        if not (some and all_left_out):
            raise
    return encoder.skipped + (0 if shown is None else shown.skipped)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log of skipped prompts, which does not name the set."""
    logger = logging.getLogger(PromptEncoder.__module__)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
