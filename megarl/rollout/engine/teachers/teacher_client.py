"""Has teachers' engines score groups: one engine of the data set's teacher for each group, within a time limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.common.errors import RequestFailed, RolloutError
from megarl.config.schema.algorithm import TeacherConfig
from megarl.queue.trajectory import Trajectory
from megarl.rollout.engine.teachers.scores import Scored, ScoreRequest, score_requests, with_scores
from megarl.rollout.engine.teachers.teacher_engine import teacher_name

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # before an engine that could not answer is asked again

# Has engine number N score requests.
Ask = Callable[[int, Sequence[ScoreRequest]], Awaitable[list[Scored]]]


class TeacherClient:
    """The engines of one teacher. A group goes to the engine with the fewest tokens to score."""

    def __init__(self, name: str, engines: int, ask: Ask, bound_s: float, *, by_group: bool = False) -> None:
        """`bound_s`: how long a group may wait (`timeouts.generate_s`). `by_group`: its number chooses the engine."""
        self.name, self._ask, self._bound_s, self._by_group = name, ask, bound_s, by_group
        self._tokens = [0] * engines

    async def score(self, group: int, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """Return the answers to the requests of a group. If an engine cannot be reached, another one is asked.

        Raises RolloutError naming the teacher and the last reason if there is no answer in time, and RequestFailed if
        an engine refuses a request.
        """
        deadline, reason = time.monotonic() + self._bound_s, "its engines have not answered"
        tokens = sum(len(each.token_ids) for each in requests)
        tried = 0
        while (left_s := deadline - time.monotonic()) > 0:
            engine = self._choose(group, tried)
            self._tokens[engine] += tokens
            try:
                async with asyncio.timeout(left_s):
                    return await self._ask(engine, requests)
            except RequestFailed:
                raise
            except TimeoutError:
                break
            except Exception as error:
                reason = f"engine {engine}: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
                logger.warning("group %d: teacher %s, %s", group, self.name, reason)
            finally:
                self._tokens[engine] -= tokens
            tried += 1
            await asyncio.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
        raise RolloutError(
            f"group {group} waited {self._bound_s:.0f} s (timeouts.generate_s) for teacher {self.name}: {reason}; see "
            f"logs/teacher-{self.name}-*.log"
        )

    def _choose(self, group: int, tried: int) -> int:
        """Return the engine to ask after `tried` engines could not answer: the next one in turn."""
        count = len(self._tokens)
        first = group % count if self._by_group else min(range(count), key=self._tokens.__getitem__)
        return (first + tried) % count


class Teachers:
    """The teachers that have engines, by the name of their data set."""

    def __init__(self, clients: Mapping[str, TeacherClient]) -> None:
        self._clients = dict(clients)

    def scores(self, dataset: str) -> bool:
        """Return whether the groups of a data set are scored."""
        return dataset in self._clients

    async def teach(self, rows: Sequence[Trajectory], dataset: str) -> list[Trajectory]:
        """Return the rows of a group with the log-probs of the set's teacher. Raises as `TeacherClient.score`."""
        requests = score_requests(rows)
        if not requests:
            return list(rows)
        client = self._clients[dataset]
        return with_scores(rows, await client.score(rows[0].group_id, requests), client.name)


def attach_teachers(
    teachers: Mapping[str, TeacherConfig], namespace: str, timeout_s: float, *, by_group: bool
) -> Teachers:
    """Return the teachers of a run by data set. The supervisor has created their actors in `namespace`."""
    clients: dict[str, TeacherClient] = {}
    by_set: dict[str, TeacherClient] = {}
    for dataset, teacher in teachers.items():
        if teacher.where != "engine":
            continue
        if teacher.name not in clients:
            clients[teacher.name] = TeacherClient(
                teacher.name, teacher.replicas, _asking(teacher.name, namespace), timeout_s, by_group=by_group
            )
        by_set[dataset] = clients[teacher.name]
    return Teachers(by_set)


def _asking(teacher: str, namespace: str) -> Ask:
    """Return a function that calls the actors of a teacher and looks them up at the first call."""
    handles: dict[int, ActorHandle] = {}

    async def ask(engine: int, requests: Sequence[ScoreRequest]) -> list[Scored]:
        if engine not in handles:
            import ray

            name = teacher_name(teacher, engine)
            handles[engine] = await asyncio.to_thread(ray.get_actor, name, namespace=namespace)
        answer: Any = await handles[engine].score.remote(list(requests))
        return list(answer)

    return ask
