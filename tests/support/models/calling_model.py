"""A tiny model that calls a Python tool in about half of its samples, taught in seconds, so that runs have calls."""

from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart.demonstrations import Demonstration
from examples.quickstart.warm_start import WarmStart, warm_start
from tests.support.models.chat_templates import CHATML_TOOLS

PRINTED = "7"
BEGIN, END = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "', '"}}</tool_call>'
CALL = f"{BEGIN}print({PRINTED}){END}"
ANSWER = f"\\boxed{{{PRINTED}}}"
SCHEMAS = [{"type": "function", "function": {"name": "code_interpreter"}}]


def teach_calls(directory: Path, problems: list[str]) -> float:
    """Train the model in `directory` on dialogues about the problems; return the loss at the end (nats per token).

    Half of them call the tool `code_interpreter` to print a 7, and then answer 7; the others answer 7 at once.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    # The template names the tool only: a schema would be longer than the prompts. What begins and ends a call are
    # tokens, as `<tool_call>` is in Qwen's vocabulary, so that the dialogues are short.
    tokenizer.chat_template = CHATML_TOOLS.replace("{{ tools | tojson }}", "{{ tools[0]['function']['name'] }}")
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (BEGIN, END)])
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert len(tokenizer) <= model.config.vocab_size
    said = "\n" + _chat(tokenizer, {"role": "tool", "content": f"{PRINTED}\n"}, tools=False)
    taught = []
    for problem in problems:
        prompt = _chat(tokenizer, {"role": "user", "content": problem}, tools=True)
        taught += [Demonstration(prompt, (CALL, ANSWER), (said,)), Demonstration(prompt, (ANSWER,))]
    size = WarmStart(steps=80, batch=16, lr=5e-3, warmup=10, threads=torch.get_num_threads())
    state = torch.random.get_rng_state()
    try:
        loss = warm_start(model, tokenizer, taught, 0, size)
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(directory)
    return loss


def _chat(tokenizer: AutoTokenizer, message: dict[str, str], *, tools: bool) -> str:
    text: str = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        [message], tools=SCHEMAS if tools else None, add_generation_prompt=True, tokenize=False
    )
    return text
