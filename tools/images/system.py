"""The content of docs/images/system.svg: the processes of a run, and what passes between them.

Positions and sizes are in the drawing's own units; an arrow begins and ends at a side of a box, at a share of its
length from the left or from the top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["left", "right", "top", "bottom"]
Kind = Literal["weights", "data", "calls"]


@dataclass(frozen=True)
class Box:
    """A process, or several of one kind (`copies`), or what a disk keeps (`stored`)."""

    key: str
    x: float
    y: float
    width: float
    height: float
    title: str
    lines: tuple[str, ...] = ()
    copies: int = 1
    stored: bool = False


@dataclass(frozen=True)
class Panel:
    """An area with boxes in it: what one program starts."""

    x: float
    y: float
    width: float
    height: float
    title: str
    quiet: str


@dataclass(frozen=True)
class Port:
    """The place at which an arrow meets a box."""

    box: str
    side: Side
    share: float = 0.5


@dataclass(frozen=True)
class Arrow:
    """A flow from one box to another. `via`: corners between them. `label`: lines of text, the first one at `at`."""

    start: Port
    end: Port
    kind: Kind
    label: tuple[str, ...]
    at: tuple[float, float]
    anchor: Literal["start", "middle", "end"] = "middle"
    via: tuple[tuple[float, float], ...] = ()
    both: bool = False


@dataclass(frozen=True)
class SystemMap:
    """All of the picture. `legend`: what the kinds of arrows mean."""

    width: int
    height: int
    title: str
    description: str
    panels: tuple[Panel, ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    legend: tuple[tuple[Kind, str], ...]


SYSTEM = SystemMap(
    width=1000,
    height=590,
    title="The system",
    description="Trainer ranks, started by torchrun, broadcast the weights to the vLLM engines of a pool that Ray "
    "manages. The rollout controller and its agent workers ask the engines for responses, score them and write groups "
    "of trajectories to TransferQueue, from which the trainer ranks read their batches. The trainer saves checkpoints.",
    panels=(
        Panel(16, 44, 300, 426, "torchrun", "trainer GPUs"),
        Panel(420, 44, 564, 426, "Ray", "rollout GPUs, and processes without one"),
    ),
    boxes=(
        Box("trainer", 36, 84, 252, 340, "Trainer ranks", (
            "Megatron-Core policy", "TP · SP · CP · PP · EP · DP", "distributed optimizer", "", "", "", "", "", "",
            "The loop", "1  take a batch", "2  advantages", "3  update", "4  publish the weights", "5  evaluate, save",
        ), copies=3),
        Box("engines", 640, 84, 312, 84, "Engine replicas", (
            "vLLM; requests in flight wait", "while weights are exchanged",
        ), copies=3),
        Box("controller", 640, 248, 320, 74, "Rollout controller", (
            "admission, bound on staleness, prompts,", "rewards, evaluation, journal",
        )),
        Box("queue", 434, 248, 130, 180, "TransferQueue", (
            "", "one row for", "each trajectory",
        )),
        Box("workers", 640, 372, 212, 74, "Agent workers", ("agent loops, tools, rewards", "(optional)"), copies=2),
        Box("gateway", 872, 372, 92, 74, "Gateway", ("HTTP", "(optional)")),
        Box("checkpoints", 36, 510, 252, 60, "Checkpoints", ("any layout can load them",), stored=True),
        Box("supervisor", 434, 510, 346, 60, "Supervisor", ("owns Ray and the pool, watches torchrun",)),
        Box("harness", 800, 510, 184, 60, "Harnesses", ("act through the gateway",)),
    ),
    arrows=(
        Arrow(Port("trainer", "right", 0.115), Port("engines", "left", 0.46), "weights", (
            "weights: one NCCL or gloo group,", "buckets checked by digests",
        ), (468, 96)),
        Arrow(Port("trainer", "right", 0.32), Port("controller", "top", 0.13), "calls", (
            "rank 0: take, commit, announce a version",
        ), (490, 184), via=((681.6, 192.8),), both=True),
        Arrow(Port("queue", "left", 0.5), Port("trainer", "right", 0.747), "data", ("batches",), (368, 330)),
        Arrow(Port("controller", "left", 0.5), Port("queue", "right", 37 / 180), "data", ("finished", "groups"),
              (600, 262)),
        Arrow(Port("workers", "left", 0.4), Port("queue", "right", 0.854), "data", ("finished", "groups"), (600, 378)),
        Arrow(Port("controller", "top", 0.5), Port("engines", "bottom", 160 / 312), "data", ("prompts,", "token ids"),
              (790, 208), "end"),
        Arrow(Port("engines", "bottom", 196 / 312), Port("controller", "top", 196 / 320), "data", (
            "tokens, log-probs,", "versions",
        ), (846, 208), "start"),
        Arrow(Port("controller", "bottom", 0.33), Port("workers", "top", 0.498), "data", ("groups, responses",),
              (756, 352), "start", both=True),
        Arrow(Port("gateway", "top", 0.5), Port("controller", "bottom", 0.869), "data", (), (0, 0), both=True),
        Arrow(Port("harness", "top", 0.641), Port("gateway", "bottom", 0.5), "data", (), (0, 0), both=True),
        Arrow(Port("trainer", "bottom", 0.5), Port("checkpoints", "top", 0.5), "data", ("save, resume",), (172, 492),
              "start", both=True),
    ),
    legend=(("weights", "weights"), ("data", "tokens and trajectories"), ("calls", "calls of the trainer")),
)  # fmt: skip
