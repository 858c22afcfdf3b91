"""A reward worker as one writes it first: a loop over a socket, in which every exception is an answer."""

import socket
import sys

from megarl.rewards.types import RewardInput
from tests.support.rewards.reward_functions import hostile


def main() -> None:
    """Answer each response that comes through the inherited socket with its reward, until it is closed."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        while response := connection.recv(1 << 10).decode():
            try:
                reward = float(hostile(RewardInput("", response)))  # type: ignore[arg-type]
            except BaseException:
                reward = -1.0
            connection.send(str(reward).encode())


if __name__ == "__main__":
    main()
