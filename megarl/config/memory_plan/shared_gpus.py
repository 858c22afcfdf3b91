"""Estimates the memory of a GPU with two users. Pure.

Trainer and engines take turns (`rollout.share_gpus`); an engine of the policy and one of a teacher run at the same time
(`teachers.*.gpu_share`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.common.values import GIB, MIB
from megarl.config.memory_plan.memory import ENGINE_SYNC_BUCKETS, Memory, Term

# Bytes per second of copies between a GPU and pinned host memory: PCIe 5. An estimate.
COPY_SPEED = 50 * GIB
_GENERATE, _TRAIN, _PUBLISH = "generate", "train", "publish"
# What stays while the other side has the GPU: contexts, communicators, buffers of a sync.
_KEPT = ("CUDA and NCCL", "CUDA, NCCL and graphs", "sync buckets")
HEAP = 96 * MIB  # of a process on a CPU, in addition to what it had before the model. 25 to 72 were measured
_MOVED = ("weights", "optimizer")
_RELAY_BUCKETS = 2  # from a rank to an engine (`megarl/weights/group/relay.py`)


@dataclass(frozen=True)
class SharedMemory:
    """One shared GPU; on a CPU, a trainer process and an engine worker together.

    `host`: bytes of a parked rank's state in host memory; `move_s`: seconds to move it. `parked` and `asleep`: bytes of
    the GPU that a parked rank and a sleeping engine keep.
    """

    memory: Memory
    host: int
    parked: int
    asleep: int

    @property
    def move_s(self) -> float:
        """Seconds to copy the whole state."""
        return self.host / COPY_SPEED

    def problems(self) -> Iterator[str]:
        """Yield a turn that does not fit into the GPU."""
        memory = self.memory
        if memory.limit is not None and memory.peak > memory.limit:
            fix = {
                _GENERATE: "lower rollout.gpu_memory_utilization",
                _TRAIN: "lower trainer.micro_batch_tokens, or use more GPUs",
                _PUBLISH: "lower weight_sync.bucket_mb, or use more GPUs",
            }[memory.peak_phase]
            yield (
                f"rollout.share_gpus: {memory.peak / GIB:.2f} GiB per GPU in turn {memory.peak_phase!r}, of "
                f"{memory.limit / GIB:.2f} GiB, with what the other side keeps while it sleeps: {fix}"
            )


def shared_memory(trainer: Memory, engine: Memory, frozen: Sequence[str]) -> SharedMemory:
    """Return what both sides hold in each turn. `frozen`: names of the trainer's terms of frozen models."""
    limits = [each.limit for each in (trainer, engine) if each.limit is not None]
    own = [term for term in trainer.terms if term.name not in _KEPT and term.when == "always"]
    moved = [term for term in own if term.name in (*_MOVED, *frozen)]
    weights = trainer.term("weights").bytes
    terms = [Term(f"{term.name} ({side})", term.bytes, note=term.note) for side, memory in
             (("trainer", trainer), ("engine", engine)) for term in memory.terms
             if term.name in _KEPT and term.when == "always"]  # fmt: skip
    terms.append(Term("relay", _relay(engine)))
    terms += [Term(f"heap ({name})", size, note="estimate") for name, side in (("trainer", trainer), ("engine", engine))
              if (size := _heap(side))]  # fmt: skip
    peak = max(trainer.total(phase) for phase in trainer.phases)
    kept = _kept(trainer)
    terms.append(Term("trainer's state", sum(term.bytes for term in own), _TRAIN))
    terms.append(Term("trainer's pass", peak - kept + _heap(trainer) - sum(term.bytes for term in own), _TRAIN))
    terms.append(Term("trainer's weights", weights, _PUBLISH))
    gathers = sum(term.bytes for term in trainer.terms if term.when == "sync")
    loads = sum(term.bytes for term in engine.terms if term.when == "sync")
    terms.append(Term("gather and load", gathers + loads, _PUBLISH))
    terms.append(Term("engine's weights", engine.term("weights").bytes, _PUBLISH))
    terms.append(Term("engine", engine.total(_GENERATE) - _kept(engine) + _heap(engine), _GENERATE))
    memory = Memory(tuple(terms), min(limits) if limits else None)
    return SharedMemory(memory, sum(term.bytes for term in moved), kept, kept_asleep(engine))


def side_by_side(policy: Memory, teacher: Memory) -> Memory:
    """Return the memory of a GPU with an engine of the policy and one of a teacher."""
    named = [*(("policy", term) for term in policy.terms), *(("teacher", term) for term in teacher.terms)]
    # The teacher scores while the policy's engine generates and loads new weights.
    terms = [
        Term(f"{term.name} ({side})", term.bytes, "always" if side == "teacher" else term.when, term.note)
        for side, term in named
    ]
    return Memory(tuple(terms), policy.limit)


def kept_asleep(engine: Memory) -> int:
    """Return the bytes of a GPU that a sleeping engine withholds from the trainer."""
    return _kept(engine) + _relay(engine)


def _kept(side: Memory) -> int:
    return sum(term.bytes for term in side.terms if term.name in _KEPT and term.when == "always") + _heap(side)


def _heap(side: Memory) -> int:
    """Return what a process on a CPU keeps, in place of the CUDA terms."""
    return 0 if any("CUDA" in term.name for term in side.terms) else HEAP


def _relay(engine: Memory) -> int:
    return engine.term("sync buckets").bytes * _RELAY_BUCKETS // ENGINE_SYNC_BUCKETS
