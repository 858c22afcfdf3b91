"""A reward worker as one writes it first: a loop over a pipe, in which every exception is an answer."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from megarl.rewards.types import RewardInput
from tests.support.reward_functions import hostile


def main() -> None:
    """Answer each response that comes through the inherited connection with its reward, until it is closed."""
    with Connection(int(sys.argv[1])) as connection:
        while True:
            try:
                response: str = connection.recv()
            except EOFError:
                return
            try:
                reward = float(hostile(RewardInput("", response)))  # type: ignore[arg-type]
            except BaseException:
                reward = -1.0
            connection.send(reward)


if __name__ == "__main__":
    main()
