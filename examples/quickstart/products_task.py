"""Products of two numbers, which a small model cannot compute: it must call the tool `calculator`.

One of five demonstrations calls it and repeats its answer; the others answer at once, which the model cannot learn to
do correctly. So the checkpoint guesses in greedy decoding, and calls the tool in about one of five samples.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from examples.quickstart.demonstrations import Demonstration, TaskData, check_apart
from examples.quickstart.tokenizer import EOS, prompt_text

TOOL = "calculator"
DEMONSTRATIONS, CALLS = 5, 1  # per problem, and how many of them call the tool
READINGS = 2  # per call: examples of what follows it, to practise repeating a number more often
HELD_OUT, TRAINED, WARM = 600, 1500, 3000  # problems

# ChatML with tools: the first line names them, which is enough for this small model. Calls have Qwen's format.
TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\ntools:' }}"
    "{% for tool in tools %}{{ ' ' + tool['function']['name'] }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What the template reads from a tool.
_SCHEMAS = [{"type": "function", "function": {"name": TOOL, "description": "", "parameters": {"type": "object"}}}]


@dataclass(frozen=True)
class Product:
    """The problem `a * b`: three digits times two."""

    a: int
    b: int

    @property
    def problem(self) -> str:
        """The question in the prompt."""
        return f"What is {self.a} * {self.b}?"

    @property
    def answer(self) -> str:
        """The product in digits."""
        return str(self.a * self.b)

    @property
    def call(self) -> str:
        """The turn that calls the calculator."""
        return f'<tool_call>{{"name": "{TOOL}", "arguments": {{"expression": "{self.a}*{self.b}"}}}}</tool_call>'

    @property
    def tool_turn(self) -> str:
        """The text between the call and the answer, as the chat template writes it."""
        return f"\n<|im_start|>tool\n{self.answer}<|im_end|>\n<|im_start|>assistant\n"

    @property
    def final(self) -> str:
        """The turn that answers."""
        return f"\\boxed{{{self.answer}}}"


class ProductsTask:
    """Implements `StarterTask`."""

    name = "calculator"
    recipe = 1
    chat_template = TOOLS_TEMPLATE
    vocabulary = 400
    steps = 800

    def data(self, seed: int) -> TaskData:
        """See `StarterTask.data`. Each warm-start problem has five rows, one per demonstration."""
        rng = random.Random(f"megarl-quickstart-products-{seed}")
        pairs = rng.sample([(a, b) for a in range(100, 1000) for b in range(10, 100)], HELD_OUT + TRAINED + WARM)
        problems = [Product(a, b) for a, b in pairs]
        held, trained, warm = (
            problems[:HELD_OUT],
            problems[HELD_OUT : HELD_OUT + TRAINED],
            problems[HELD_OUT + TRAINED :],
        )
        return TaskData(
            warm_start=[_row(item) | {"solution": text} for item in warm for text in _first_turns(item)],
            train=[_row(item) for item in trained],
            heldout=[_row(item) for item in held],
        )

    def check(self, problems: Mapping[str, Sequence[str]]) -> None:
        """See `StarterTask.check`."""
        check_apart(problems)

    def corpus(self, data: TaskData) -> Iterable[str]:
        """Yield the warm-start set's texts, with the chat template's roles."""
        for row in data.warm_start:
            item = _parse(row["problem"])
            yield from (f"system\ntools: {TOOL}", f"user\n{item.problem}", f"assistant\n{row['solution']}")
            yield from ("assistant\n", f"tool\n{item.answer}", item.final)

    def demonstrations(self, tokenizer: PreTrainedTokenizerFast, data: TaskData) -> list[Demonstration]:
        """See `StarterTask.demonstrations`."""
        found = []
        for row in data.warm_start:
            item = _parse(row["problem"])
            prompt = prompt_text(tokenizer, item.problem, _SCHEMAS)
            if row["solution"] == item.call:
                found.append(Demonstration(prompt, (item.call, item.final), (item.tool_turn,)))
                called = prompt + item.call + EOS + item.tool_turn
                found += [Demonstration(called, (item.final,))] * READINGS
            else:
                found.append(Demonstration(prompt, (item.final,)))
        return found


def _first_turns(item: Product) -> list[str]:
    return [item.call] * CALLS + [item.final] * (DEMONSTRATIONS - CALLS)


def _row(item: Product) -> dict[str, str]:
    return {"problem": item.problem, "answer": item.answer}


def _parse(problem: str) -> Product:
    first, second = problem.removeprefix("What is ").removesuffix("?").split(" * ")
    return Product(int(first), int(second))
