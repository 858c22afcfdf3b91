"""The kinds of faults of the soak, the schedule in which they happen, and what has become of each."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ANY_NUMBER = 99  # of steps
Consequence = Literal["replaced", "same", "survived"]
Moment = Literal["busy", "idle", "in-sync"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what happens (`action`) to which part of the run (`target`), and what the run must do.

    `outcome`: "replaced": a publication replaces the replica; "same": the same engine works on; "survived": the part is
    there again and two more steps are done, after `restarts` restarts of the ranks and `starts` starts of the job at
    most, and `redone` steps were made again at most.
    `metric`, `printed`: a metric that has then counted the fault, a text that the run has printed once more, in its
    output or in the log of an agent worker. `seconds`: how long it lasts at least and at most, 0 if it is over at
    once. `moment`: what a replica does when it is hit: it works on requests, it has none, or it takes part in a
    publication of the weights.
    """

    action: str
    target: str
    outcome: Consequence
    seconds: tuple[float, float] = (0.0, 0.0)
    restarts: int = 0
    starts: int = 0
    moment: Moment = "busy"
    metric: str = ""
    printed: str = ""
    redone: int = ANY_NUMBER

    @property
    def name(self) -> str:
        """The name by which `--faults` selects it."""
        return f"{self.action}-{self.target}" + ("" if self.moment == "busy" else f"-{self.moment}")

    @property
    def has_processes(self) -> bool:
        """True if the fault hits processes from outside."""
        return self.target != "files" and not self.order

    @property
    def order(self) -> str:
        """The order (chaos/orders.py) by which the fault happens; "" if it happens otherwise."""
        if self.action == "spoil":
            return self.target
        return self.name if self.action in ("fork", "flood") else ""

    @property
    def loses(self) -> bool:
        """True if the fault costs a replica."""
        return self.outcome == "replaced"

    @property
    def ends(self) -> bool:
        """True if the fault may end the ranks, the whole job, or the controller and its queue."""
        return bool(self.restarts or self.starts) or self.target in {"controller", "queue"}


LONG_S = (90.0, 90.0)  # or until the run has ended the process
LOST_WORKER = "rollout/workers_lost"
FLOODED = "the output of this worker was flooded"
SKIPPED = "the step is skipped"
KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", "engine", "replaced"),
        Kind("kill", "engine", "replaced", moment="idle"),
        Kind("kill", "engine", "replaced", moment="in-sync"),
        Kind("kill", "replica", "replaced"),
        Kind("hang", "engine", "replaced", seconds=LONG_S),
        Kind("hang", "engine", "replaced", seconds=LONG_S, moment="in-sync"),
        Kind("hang", "replica", "replaced", seconds=LONG_S),
        Kind("crawl", "engine", "replaced", seconds=LONG_S),
        Kind("pause", "engine", "same", seconds=(2.0, 5.0)),
        Kind("pause", "replica", "same", seconds=(2.0, 5.0)),
        Kind("slow", "engine", "same", seconds=(8.0, 15.0)),
        Kind("kill", "reward", "survived"),
        Kind("hang", "reward", "survived", seconds=(60.0, 60.0)),
        Kind("fork", "reward", "survived"),
        Kind("flood", "reward", "survived", metric="reward/redone"),
        Kind("kill", "agent-worker", "survived", metric=LOST_WORKER),
        Kind("hang", "agent-worker", "survived", seconds=LONG_S, metric=LOST_WORKER),
        Kind("flood", "agent-worker", "survived", printed=FLOODED),
        Kind("spoil", "gradient", "survived", printed=SKIPPED),
        Kind("spoil", "logprob", "survived", printed=SKIPPED),
        Kind("kill", "controller", "survived"),
        Kind("hang", "controller", "survived", seconds=LONG_S),
        Kind("kill", "queue", "survived"),
        Kind("hang", "queue", "survived", seconds=LONG_S),
        Kind("kill", "rank", "survived", restarts=1),
        Kind("hang", "rank", "survived", seconds=(240.0, 240.0), restarts=1),
        Kind("kill", "agent", "survived", starts=1),
        Kind("kill", "job", "survived", starts=1),
        Kind("damage", "job", "survived", starts=1),
        Kind("interrupt", "job", "survived", starts=1),
        Kind("terminate", "job", "survived", starts=1),
        Kind("limit", "job", "survived", starts=1, redone=0, printed="stopping after"),
        Kind("stale", "files", "survived", seconds=(10.0, 20.0)),
    )
}

# Of each of these a draw has at least one: an engine that dies, one that stops and one that is slow are what a run of
# weeks is sure to meet, and by chance nearly half of all draws would kill none.
ALWAYS = [
    {name for name, kind in KINDS.items() if kind.target in ("engine", "replica") and kind.action in actions}
    for actions in (("kill",), ("hang", "pause"), ("slow", "crawl"))
]


@dataclass(frozen=True)
class Fault:
    """One fault of the schedule: `delay_s` after step `after_step` it hits a process of its target for `seconds`.

    `index`: the replica, or the number of the process among those of the target, counted modulo how many there are.
    """

    kind: Kind
    index: int
    after_step: int
    delay_s: float
    seconds: float

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        where = {"engine": f"the engine of replica {self.index}", "replica": f"replica {self.index}"}
        when = "" if self.kind.moment == "busy" else f" ({self.kind.moment})"
        return f"{self.kind.action} {where.get(self.kind.target, f'the {self.kind.target}')}{when}{lasting}"


def draw(seed: int, count: int, without: Sequence[str] = ()) -> list[str]:
    """Return names of `count` kinds, each once: the first ones are one of each of ALWAYS.

    `without`: kinds that cannot happen here.
    """
    order = [name for name in KINDS if name not in without]
    random.Random(f"soak-draw-{seed}").shuffle(order)
    chosen = [found for names in ALWAYS if (found := next((name for name in order if name in names), None))]
    return [*chosen, *(name for name in order if name not in chosen)][:count]


def schedule(seed: int, wanted: Sequence[str], *, replicas: int, first: int, last: int) -> list[Fault]:
    """Return the wanted faults in a random order, spread over the steps from `first` to `last`.

    Raises ValueError for an unknown kind, and if there are no steps.
    """
    if unknown := set(wanted) - KINDS.keys():
        raise ValueError(f"unknown faults: {', '.join(sorted(unknown))}; known are {', '.join(sorted(KINDS))}")
    if not 0 <= first < last:
        raise ValueError(f"faults need steps to happen in, not {first} to {last}")
    rng = random.Random(f"soak-{seed}")
    order = [KINDS[name] for name in wanted]
    rng.shuffle(order)
    faults = []
    for number, kind in enumerate(order):
        step = first + (last - first) * number // len(order)
        seconds = round(rng.uniform(*kind.seconds), 1)
        faults.append(Fault(kind, rng.randrange(replicas), step, round(rng.uniform(0.0, 1.0), 2), seconds))
    return faults


def missing(faults: Sequence[Fault], over: Sequence[Fault]) -> list[str]:
    """Return the kinds of the schedule of which no fault has come to its end; `over`: the faults that have."""
    return sorted({fault.kind.name for fault in faults} - {fault.kind.name for fault in over})


@dataclass
class Happened:
    """A fault that was injected: when, on which process, and what the run did. `over`: it did what it should.

    `busy`: the engine had requests. `continued`, `restarted`: the responses that other engines have finished, and the
    replicas that were restarted, until the next fault. `recovered_s`: from the fault until the run had gone on with
    what was lost. `redone_steps`: steps that a resume has gone back. `spoiled`: numbers that it has
    made not finite. `damaged`: the checkpoint that it has changed. `printed_before`: how often the run had printed
    the text of such a fault.
    """

    fault: Fault
    pid: int
    step: int
    at_s: float
    over: bool = False
    busy: bool = False
    continued: int = 0
    restarted: int = 0
    recovered_s: float = 0.0
    redone_steps: int = 0
    spoiled: int = 0
    printed_before: int = 0
    damaged: Path | None = None
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        state = "" if self.over else "NOT OVER: "
        return f"step {self.step}, {self.fault} (pid {self.pid}): {state}{'; '.join(self.notes)}"


def lethal(happened: Sequence[Happened]) -> list[Happened]:
    """Return the faults that cost a replica."""
    return [each for each in happened if each.fault.kind.loses]
