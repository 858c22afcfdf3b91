"""The way to a teacher's engines: the least busy one, another one if it is lost, and never without a bound."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from megarl.common.errors import RequestFailed, RolloutError
from megarl.rollout.engine.teachers import teacher_client
from megarl.rollout.engine.teachers.scores import Scored, ScoreRequest
from megarl.rollout.engine.teachers.teacher_client import TeacherClient, Teachers
from tests.support.rollout.scored_rows import row


class Engines:
    """Engines that answer after `takes_s`; those of `broken` raise."""

    def __init__(self, takes_s: float = 0.0, broken: Sequence[int] = (), error: type[Exception] = ConnectionError):
        self.takes_s, self.broken, self.error = takes_s, set(broken), error
        self.asked: Counter[int] = Counter()

    async def __call__(self, engine: int, requests: Sequence[ScoreRequest]) -> list[Scored]:
        self.asked[engine] += 1
        if engine in self.broken:
            raise self.error(f"engine {engine} is gone")
        await asyncio.sleep(self.takes_s)
        return [[-1.0] * (len(each.token_ids) - each.start) for each in requests]


REQUESTS = [ScoreRequest([1, 2, 3, 4], 2)]


def client(engines: Engines, count: int = 2, bound_s: float = 30.0, **options: bool) -> TeacherClient:
    return TeacherClient("big", count, engines, bound_s, **options)


async def test_groups_are_spread_over_the_engines() -> None:
    engines = Engines(takes_s=0.05)
    made = client(engines, 3)
    await asyncio.gather(*(made.score(group, REQUESTS) for group in range(9)))
    assert engines.asked == {0: 3, 1: 3, 2: 3}
    assert made._tokens == [0, 0, 0]


def test_a_deterministic_run_chooses_by_the_number_of_the_group() -> None:
    engines = Engines()
    made = client(engines, 2, by_group=True)
    for group in (1, 3, 5):
        asyncio.run(made.score(group, REQUESTS))
    assert engines.asked == {1: 3}


def test_another_engine_answers_for_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_client, "RETRY_S", 0.01)
    engines = Engines(broken=[0])
    assert asyncio.run(client(engines).score(7, REQUESTS)) == [[-1.0, -1.0]]
    assert engines.asked == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("engines", "message"), [(Engines(broken=[0, 1]), "ConnectionError"), (Engines(60.0), "not ans")]
)
def test_a_group_waits_within_the_bound_and_the_error_names_the_teacher(
    monkeypatch: pytest.MonkeyPatch, engines: Engines, message: str
) -> None:
    monkeypatch.setattr(teacher_client, "RETRY_S", 0.01)
    with pytest.raises(RolloutError, match=rf"group 7 waited 0 s \(timeouts.generate_s\) for teacher big: .*{message}"):
        asyncio.run(client(engines, bound_s=0.2).score(7, REQUESTS))


def test_a_request_that_an_engine_refuses_is_not_repeated() -> None:
    engines = Engines(broken=[0, 1], error=RequestFailed)
    with pytest.raises(RequestFailed):
        asyncio.run(client(engines).score(7, REQUESTS))
    assert sum(engines.asked.values()) == 1


def test_a_set_without_a_teacher_is_not_scored_and_a_group_without_usable_rows_asks_nobody() -> None:
    engines = Engines()
    teachers = Teachers({"math": client(engines)})
    assert teachers.scores("math") and not teachers.scores("code")
    failed = [row(0, status="failed", failure="aborted")]
    assert asyncio.run(teachers.teach(failed, "math")) == failed and not engines.asked
    taught = asyncio.run(teachers.teach([row(0), row(1)], "math"))
    assert [each.streams["teacher_logprobs"] for each in taught] == [[-1.0] * 3] * 2
