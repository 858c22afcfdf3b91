"""Declares every event of megarl once: its name, stream, meaning and arguments.

`docs/reference/events.md` is generated from it. Recording a name that is not declared here raises UndeclaredEvent.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

EventStream = Literal["rare", "steps", "details"]
STREAMS: tuple[EventStream, ...] = get_args(EventStream)
Shape = Literal["span", "mark", "counter"]


class UndeclaredEvent(KeyError):  # noqa: N818
    """An event was recorded under a name that is not declared."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class EventKind:
    """The declaration of one event.

    `stream`: `rare` events are few, `steps` are some per step or publication, `details` belong to single requests.
    `shape`: a `span` has a duration, a `mark` has none, a `counter` has numbers that hold from its time on. `track`:
    its line in a trace of the process; spans of one track are nested or follow each other. Empty: spans overlap, and
    each sample (group, sample) has a separate line. `args`: (name, meaning) pairs.
    """

    name: str
    stream: EventStream
    shape: Shape
    track: str
    meaning: str
    args: tuple[tuple[str, str], ...] = ()


_PHASE = "Phase of a step, as `time/{name}` counts it; a phase inside it interrupts that count."
_TIMES = (
    ("queue_s", "Seconds without an engine's work: for a place in an engine, in its queue, or on the way."),
    ("prefill_s", "Seconds in which engines read the prompt, up to the first token."),
    ("decode_s", "Seconds from the first token to the last one."),
    ("tool_s", "Seconds in tools."),
    ("reward_s", "Seconds for the reward, the wait for a reward process included."),
    ("other_s", "The rest."),
)
_LINK = "weight sync calls"

_TRAINER = [
    EventKind(
        "step", "steps", "span", "train",
        "One step of the trainer, from the end of the one before; an evaluation that it waits for included.",
    ),
    *(
        EventKind(name, "steps", "span", "train", _PHASE.replace("{name}", name))
        for name in ("generate", "queue", "logprobs", "update", "drain", "sync", "eval", "save")
    ),
    EventKind(
        "mini_batch", "details", "span", "train", "One update of a step: all its micro-batches, forward and backward, "
        "and the optimizer.", (("samples", "Samples of this rank."), ("tokens", "Their tokens, packed.")),
    ),
    EventKind(
        "prepare_batch", "steps", "span", "next batch",
        "The thread that waits for the batch of the step, plans, fetches and packs it.",
    ),
    EventKind(
        "publication", "steps", "span", _LINK, "One published version: the leader's calls to all replicas.",
        (("bytes", "Bytes of the weights."), ("restarted", "Replicas that were replaced meanwhile.")),
    ),
    *(
        EventKind(f"sync_{name}", "steps", "span", _LINK, f"Part of a publication: {meaning}")
        for name, meaning in (
            ("stage", "the leader gathers its first buckets, and engines still generate."),
            ("pause", "all replicas pause."),
            ("wake", "all replicas take memory for weights, where they share the trainer's GPUs."),
            ("start", "they prepare their models."),
            ("update", "they receive and load all buckets."),
            ("finish", "they take the version over."),
            ("resume", "they generate again."),
        )
    ),
    EventKind(
        "checkpoint", "rare", "span", "checkpoint", "A checkpoint from the copy of the state to its last file.",
        (("path", "Where it is; absent if it failed."), ("error", "Why it failed.")),
    ),
    EventKind(
        "evaluation", "rare", "span", "evaluation", "An evaluation, from its beginning to its report.",
        (("label", "Name of its response file."), ("alongside_training", "1 if training went on meanwhile.")),
    ),
    EventKind(
        "rolled_back", "rare", "mark", "train",
        "The run resumes after `step`: what was recorded of later steps before this mark is not of its history.",
        (("since", "Unix seconds from which on events without a step are rolled back too."),),
    ),
]  # fmt: skip

_ROLLOUT = [
    EventKind("busy", "details", "span", "engine", "The engine had requests. Breaks below 0.1 s are left out.",
              (("running", "Most requests in its batch."), ("waiting", "Most requests without a place in it."))),
    EventKind("load", "details", "counter", "load", "The engine's load, at most every 10 s.",
              (("running", "Requests in its batch."), ("waiting", "Requests without a place in it."),
               ("kv_usage", "Share of its KV cache in use, 0 to 1."))),
    EventKind("paused", "steps", "span", "weights", "The replica was paused for a publication, its calls included."),
    EventKind("join_group", "steps", "span", "weights", "The replica joined the group of the weight sync."),
    EventKind("load_weights", "steps", "span", "weights", "The replica received and loaded the weights of `version`."),
    EventKind("trajectory", "details", "span", "", "One sample of a group, from its first request to its reward.",
              (("turns", "Responses."), ("tokens", "Their tokens."), *_TIMES)),
    EventKind("turn", "details", "span", "", "One response of an engine, the wait for a place in one included.",
              (("turn", "Its number in the trajectory, from 0."), ("tokens", "Its tokens."),
               ("queue_s", _TIMES[0][1]), ("prefill_s", _TIMES[1][1]), ("decode_s", _TIMES[2][1]))),
    EventKind("tool", "details", "span", "", "One call of a tool.",
              (("tool", "Its name."), ("error", "1 if its answer is an error."))),
    EventKind("reward", "details", "span", "", "The reward of one sample.", (("error", "1 if the function failed."),)),
    EventKind("slow_trajectory", "steps", "span", "",
              "One of the slowest trajectories among those that ended for the batch of `step`.",
              (("turns", "Responses."), ("tokens", "Their tokens."), *_TIMES,
               ("cause", "The largest part: queue, prefill, decode, tool, reward or other."))),
    EventKind("batch_taken", "steps", "mark", "batches", "The trainer took the batch of `step`.",
              (("groups", "Its groups."), ("in_flight", "Groups that are generated."))),
]  # fmt: skip

# The kinds of faults, and of the recoveries that end them.
FAULTS = {
    "engine": "An engine is lost; a replica serves again in its place, or the same one.",
    "agent_worker": "An agent worker is lost; another one is up in its place.",
    "controller": "The rollout controller is lost; another one has taken over.",
    "ranks": "The trainer ranks have failed; torchrun has started them again.",
    "group": "A prompt group has failed, and is counted as failed.",
    "step": "A step is skipped: its loss, gradients or log-probs are not finite, or an alarm of the monitor skips it.",
    "alarm": "An alarm of the monitor has begun; its value has recovered, or another engine has the replica's place.",
    "sync": "A publication failed and is repeated without the replicas that failed.",
    "checkpoint": "A checkpoint could not be saved; a later one could.",
    "run": "The run ends with an error.",
}

_COMMON = [
    EventKind("fault", "rare", "mark", "faults", "Something was lost or has failed.",
              (("kind", "One of the kinds below."), ("text", "What happened."), ("rule", "Of an alarm."))),
    EventKind("recovery", "rare", "mark", "faults", "The run continues after a fault of the same kind.",
              (("kind", "That of the fault."), ("text", "How."), ("rule", "That of the alarm."))),
    EventKind("events_lost", "rare", "mark", "faults",
              "Events of this process that were not written, because its disk took them too slowly or not at all.",
              (("count", "Their number since the process started."),)),
]  # fmt: skip

KINDS: dict[str, EventKind] = {kind.name: kind for kind in (*_TRAINER, *_ROLLOUT, *_COMMON)}


def kind_of(name: str) -> EventKind:
    """Return the declaration of an event. Raises UndeclaredEvent."""
    try:
        return KINDS[name]
    except KeyError:
        raise UndeclaredEvent(f"event {name!r} is not declared in megarl/telemetry/trace/kinds.py") from None


def streams_of(names: Iterable[str] | None) -> frozenset[EventStream]:
    """Return the streams of events of these names; all streams for None. Raises UndeclaredEvent."""
    return frozenset(STREAMS) if names is None else frozenset(kind_of(name).stream for name in names)
