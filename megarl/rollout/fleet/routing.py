"""The choice of the replica for the next requests. Pure: no clock, no processes.

The replica with the fewest outstanding samples is chosen, with prefix affinity: requests of one group (one prompt) go
to the replica of the group's first request, which has the prompt in its KV cache, unless that replica has more than
`slack` outstanding samples above the least loaded one.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable


class Router:
    """Counts outstanding samples per replica and assigns requests."""

    def __init__(self, replicas: Iterable[int], slack: int = 64) -> None:
        """`slack`: outstanding samples above the least loaded replica up to which affinity holds (>= 0).

        Raises ValueError without a replica.
        """
        self._load: dict[int, int] = dict.fromkeys(sorted(replicas), 0)
        self._home: dict[Hashable, int] = {}
        self._open: dict[Hashable, int] = {}
        self.slack = slack
        if not self._load:
            raise ValueError("routing needs at least one replica")

    @property
    def load(self) -> dict[int, int]:
        """The number of outstanding samples per serving replica."""
        return dict(self._load)

    def assign(
        self,
        prefix: Hashable,
        samples: int,
        number: int | None = None,
        full: Container[int] = (),
        near: int | None = None,
    ) -> int | None:
        """Choose a replica for `samples` requests that share `prefix`, and count them as outstanding.

        `near`: a replica that has the prefix in its cache although no request is outstanding there, as between two
        turns of a dialogue. With `number` the choice depends on nothing but that number modulo the number of serving
        replicas. None if the chosen replica, or without `number` every replica, is in `full`, and if there is no
        replica.
        """
        open_ = [replica for replica in self._load if replica not in full]
        if number is not None:
            open_ = [each for each in open_ if each == sorted(self._load)[number % len(self._load)]]
        if not open_:
            return None
        chosen = min(open_, key=lambda replica: (self._load[replica], replica))
        home = self._home.get(prefix, near)
        if home in open_ and self._load[home] - self._load[chosen] <= self.slack:
            chosen = home
        self._home[prefix] = chosen
        self._open[prefix] = self._open.get(prefix, 0) + samples
        self._load[chosen] += samples
        return chosen

    def release(self, prefix: Hashable, replica: int, samples: int) -> None:
        """Record that `samples` requests (>= 0), which `assign` gave to `replica`, are done.

        A removed replica is accepted. Raises ValueError if the replica has fewer outstanding samples.
        """
        if not samples:
            return
        if replica in self._load:
            if samples > self._load[replica]:
                raise ValueError(f"replica {replica} has {self._load[replica]} outstanding samples, not {samples}")
            self._load[replica] -= samples
        self._open[prefix] -= samples
        if self._open[prefix] <= 0:
            del self._open[prefix]
            self._home.pop(prefix, None)

    def remove(self, replica: int) -> None:
        """Remove a replica that is lost; one that is not there is accepted."""
        self._load.pop(replica, None)
        self._home = {prefix: home for prefix, home in self._home.items() if home != replica}

    def add(self, replica: int) -> None:
        """Add a new or restarted replica, which is idle. Raises ValueError if it is in the pool already."""
        if replica in self._load:
            raise ValueError(f"replica {replica} is already in the pool")
        self._load[replica] = 0
