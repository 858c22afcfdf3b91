"""Pictures of three bars: the warm start learned to name the shortest, reinforcement learning asks for the longest.

The warm start asks both questions about each picture. The answers for the shortest bar are right, so the vision tower
learns useful features. Those for the longest bar are random, so the checkpoint guesses. Reinforcement learning asks
only for the longest bar, and sees whether the colour is right.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw
from transformers import PreTrainedTokenizerFast

from examples.quickstart.demonstrations import Demonstration, TaskData, check_apart
from examples.quickstart.seeing_model import IMAGE_TEMPLATE, SIDE, image_prompt

COLOURS = {"red": (230, 0, 0), "green": (0, 200, 0), "blue": (0, 60, 255)}
BACKGROUND = (124, 116, 104)  # the mean that the image processor subtracts, so only the bars are visible
LENGTHS = ((8, 14), (20, 28), (36, 48))  # from shortest to longest, in pixels of 56
LONGEST, SHORTEST = "Which bar is the longest?", "Which bar is the shortest?"
HELD_OUT, TRAINED, WARM = 600, 1200, 2400  # pictures


@dataclass(frozen=True)
class Bars:
    """A picture and its bars' colours, from the shortest to the longest."""

    png: bytes
    colours: tuple[str, ...]

    @property
    def name(self) -> str:
        """The picture's file name, derived from its content: equal pictures share one name."""
        return f"pictures/{hashlib.sha256(self.png).hexdigest()[:16]}.png"


class BarsTask:
    """Implements `StarterTask`; see the module docstring."""

    name = "bars"
    recipe = 1
    chat_template = IMAGE_TEMPLATE
    vocabulary = 320
    steps = 150

    def data(self, seed: int) -> TaskData:
        """See `StarterTask.data`."""
        rng = random.Random(f"megarl-quickstart-bars-{seed}")
        drawn = dict.fromkeys(_draw(rng) for _ in range(HELD_OUT + TRAINED + WARM + 100))
        bars = list({each.name: each for each in drawn}.values())
        held, trained, warm = (
            bars[:HELD_OUT],
            bars[HELD_OUT : HELD_OUT + TRAINED],
            bars[HELD_OUT + TRAINED : HELD_OUT + TRAINED + WARM],
        )
        # The shortest bar is drawn twice as often, so greedy decoding names it.
        guesses = [rng.choice((each.colours[0], *each.colours)) for each in warm]
        return TaskData(
            warm_start=[
                row | {"solution": solution}
                for each, guess in zip(warm, guesses, strict=True)
                for row, solution in ((_row(each, SHORTEST), each.colours[0]), (_row(each, LONGEST), guess))
            ],
            train=[_row(each, LONGEST) for each in trained],
            heldout=[_row(each, LONGEST) for each in held],
            pictures={each.name: each.png for each in (*held, *trained, *warm)},
        )

    def check(self, problems: Mapping[str, Sequence[str]]) -> None:
        """See `StarterTask.check`."""
        check_apart(problems)

    def corpus(self, data: TaskData) -> Iterable[str]:
        """Yield the warm-start set's texts, with the chat template's roles."""
        for row in data.warm_start:
            yield from (f"user\n{row['problem']}", f"assistant\n{row['solution']}", row["solution"])

    def demonstrations(self, tokenizer: PreTrainedTokenizerFast, data: TaskData) -> list[Demonstration]:
        """See `StarterTask.demonstrations`."""
        return [
            Demonstration(
                image_prompt(tokenizer, row["problem"]), (row["solution"],), picture=data.pictures[row["images"]]
            )
            for row in data.warm_start
        ]


def _draw(rng: random.Random) -> Bars:
    """Draw three bars, one below the other, each in a different colour."""
    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    pen = ImageDraw.Draw(image)
    colours = tuple(rng.sample(list(COLOURS), len(COLOURS)))
    places = rng.sample(range(len(colours)), len(colours))
    for colour, place, (least, most) in zip(colours, places, LENGTHS, strict=True):
        length = rng.randint(least, most)
        left, top = rng.randint(2, SIDE - 2 - length), 3 + 13 * place + rng.randint(0, 2)
        pen.rectangle((left, top, left + length - 1, top + 7), fill=COLOURS[colour])
    out = io.BytesIO()
    image.save(out, "PNG")
    return Bars(out.getvalue(), colours)


def _row(bars: Bars, question: str) -> dict[str, str]:
    answer = bars.colours[-1 if question == LONGEST else 0]
    return {"images": bars.name, "problem": question, "answer": answer}
