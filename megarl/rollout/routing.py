"""Which replica takes the next group. Pure: no clock, no processes.

Least-loaded by outstanding samples, with prefix affinity: requests of one group (one prompt) go where its first went,
because the prompt's KV cache is there, unless that replica is ahead of the least loaded one by more than `slack`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Router:
    def __init__(self, replicas: Iterable[int], slack: int = 64) -> None:
        """`slack`: samples by which an affine replica may be ahead before affinity gives way (>= 0)."""
        self._load: dict[int, int] = dict.fromkeys(sorted(replicas), 0)
        self._home: dict[Hashable, int] = {}
        self._open: dict[Hashable, int] = {}
        self.slack = slack
        if not self._load:
            raise ValueError("routing needs at least one replica")

    @property
    def load(self) -> dict[int, int]:
        """Outstanding samples per living replica."""
        return dict(self._load)

    def assign(self, prefix: Hashable, samples: int, number: int | None = None) -> int:
        """Choose a replica for `samples` requests that share `prefix`, and count them as outstanding.

        With `number` the choice is that number modulo the replicas, and nothing else.
        """
        least = min(self._load, key=lambda replica: (self._load[replica], replica))
        home = self._home.get(prefix)
        near = home is not None and self._load[home] - self._load[least] <= self.slack
        chosen = home if near and home is not None else least
        if number is not None:
            chosen = sorted(self._load)[number % len(self._load)]
        self._home[prefix] = chosen
        self._open[prefix] = self._open.get(prefix, 0) + samples
        self._load[chosen] += samples
        return chosen

    def finish(self, prefix: Hashable, replica: int, samples: int) -> None:
        """`samples` of what `assign` gave to `replica` are done. A removed replica is accepted."""
        if replica in self._load:
            if samples > self._load[replica]:
                raise ValueError(f"replica {replica} has {self._load[replica]} outstanding samples, not {samples}")
            self._load[replica] -= samples
        self._open[prefix] -= samples
        if self._open[prefix] <= 0:
            del self._open[prefix]
            self._home.pop(prefix, None)

    def remove(self, replica: int) -> None:
        """The replica is gone; ValueError if it was the last."""
        if set(self._load) == {replica}:
            raise ValueError(f"replica {replica} was the last one")
        self._load.pop(replica, None)
        self._home = {prefix: home for prefix, home in self._home.items() if home != replica}

    def add(self, replica: int) -> None:
        """A new or restarted replica, idle."""
        if replica in self._load:
            raise ValueError(f"replica {replica} is already in the pool")
        self._load[replica] = 0
