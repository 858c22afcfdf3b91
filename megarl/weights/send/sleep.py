"""The leader's calls that take a GPU from the engines for the trainer, and give it back.

On shared GPUs engines sleep while the trainer has the memory. A GPU is free only when all engines have confirmed their
sleep. A publication wakes the memory of the weights, loads and verifies them, and sets the version. Only then does the
memory of the cache wake, and they generate again.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Literal

from megarl.common.errors import EngineMayRun, PoolEnded, ReplicaFailed, WeightSyncError
from megarl.common.values import GIB
from megarl.weights.group.protocols import ReplicaHandle
from megarl.weights.send.failure import CallsFailed, brief
from megarl.weights.send.leader import EXTRA_WAIT_S, call_all

logger = logging.getLogger(__name__)


class HeldMemory:
    """The bytes that each engine was last known to hold on its fullest GPU."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._asleep: set[str] = set()

    def note(self, name: str, held: object, state: Literal["asleep", "awake"]) -> None:
        """Record an engine's answer; None: unknown."""
        (self._asleep.add if state == "asleep" else self._asleep.discard)(name)
        if isinstance(held, int):
            self._bytes[name] = held

    def forget(self, names: Iterable[str]) -> None:
        """These engines have ended."""
        for name in names:
            self._bytes.pop(name, None)

    @property
    def most_asleep(self) -> int:
        """The most bytes that a sleeping engine holds; 0 if unknown."""
        return max((held for name, held in self._bytes.items() if name in self._asleep), default=0)

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {held / GIB:.2f} GiB {'asleep' if name in self._asleep else 'awake'}"
            for name, held in self._bytes.items()
        )


def put_to_sleep(
    replicas: Sequence[ReplicaHandle], rpc_s: float, held: HeldMemory | None = None, start_s: float = 0.0
) -> list[str]:
    """Make all engines sleep; return the names of those that were ended instead, because they have failed.

    The next publication replaces these. Raises WeightSyncError that names the replicas that have not answered within
    `rpc_s` seconds, or whose engine may still run: they may hold memory. `held` has what they held last, and is updated
    with the answers of the others. Raises PoolEnded. `start_s`: extra time, because engines may be starting.
    """
    held = HeldMemory() if held is None else held
    failures = _call(replicas, "sleep", rpc_s + start_s, held=held)
    failed = [name for name, error in failures.items() if _has_failed(error)]
    _refuse_silent(failures, "sleep", rpc_s, held, start_s)
    lost = [replica for replica in replicas if replica.name in failed]
    for name in failed:
        logger.warning("engine %s is ended, because it could not sleep: %s", name, brief(failures[name]))
    _refuse_silent(_call(lost, "shutdown", rpc_s), "end its engine", rpc_s, held)  # one that has died holds no memory
    held.forget(failed)
    return failed


def wake_caches(replicas: Sequence[ReplicaHandle], rpc_s: float, held: HeldMemory | None = None) -> list[str]:
    """Make all engines generate with their new weights; return the names of those that cannot.

    These refuse requests from now on, so the pool does not wait for them. Raises PoolEnded.
    """
    failures = _call(replicas, "wake", rpc_s, "kv_cache", held=held)
    for replica in replicas:
        if (error := failures.get(replica.name)) is None:
            continue
        logger.warning("engine %s does not generate again: %s", replica.name, brief(error))
        try:
            replica.call("fail", f"could not wake from its sleep: {brief(error)}", timeout_s=EXTRA_WAIT_S)
        except Exception as failure:  # a dead replica cannot answer
            logger.info("engine %s, which did not wake, was not notified: %s", replica.name, brief(failure))
    return list(failures)


def _call(
    replicas: Sequence[ReplicaHandle], method: str, rpc_s: float, *args: object, held: HeldMemory | None = None
) -> dict[str, BaseException]:
    """Call a method of all replicas at the same time; return the failures by the replica's name.

    `held` takes note of the answers. Raises PoolEnded.
    """
    failures: dict[str, BaseException] = {}
    for_each = [args] * len(replicas)
    try:
        answers = dict(enumerate(call_all(replicas, method, for_each, timeout_s=rpc_s, extra_s=rpc_s)))
    except CallsFailed as error:
        failures = {replicas[index].name: each for index, each in error.failures.items()}
        answers = error.results
        for each in failures.values():
            if isinstance(each, PoolEnded):
                raise each from error
    if held is not None:
        for index, answer in answers.items():
            held.note(replicas[index].name, answer, "asleep" if method == "sleep" else "awake")
    return failures


def _has_failed(error: BaseException) -> bool:
    return isinstance(error, ReplicaFailed) and not isinstance(error, EngineMayRun)


def _refuse_silent(
    failures: dict[str, BaseException], what: str, rpc_s: float, held: HeldMemory, start_s: float = 0.0
) -> None:
    silent = [name for name, error in failures.items() if not _has_failed(error)]
    if silent:
        reasons = "; ".join(f"{name}: {brief(failures[name])}" for name in silent)
        known = f"; what engines held last: {held}" if str(held) else ""
        keys = "timeouts.rpc_s + timeouts.engine_start_s" if start_s else "timeouts.rpc_s"
        raise WeightSyncError(
            f"the trainer waited {rpc_s + start_s:.0f} s ({keys}) for {', '.join(silent)} to {what}, and may not use "
            f"the GPUs that they hold: {reasons}{known}",
            failed_members=[f"engine {name}" for name in silent],
        )
