"""The time by which a prompt group has to end, by the config."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.rollout.group_deadline import GroupDeadline
from tests.support.configs import config as config_of


@pytest.mark.parametrize(
    ("rollout", "deadline"),
    [
        ({}, None),
        ({"on_group_deadline": "fail"}, None),
        ({"group_deadline_s": 30, "on_group_deadline": "finish"}, None),
        ({"group_deadline_s": 30}, GroupDeadline(130.0, 30.0, "cut")),
        ({"group_deadline_s": 30, "on_group_deadline": "fail"}, GroupDeadline(130.0, 30.0, "fail")),
    ],
    ids=str,
)
def test_the_deadline_of_a_group_that_starts_now(rollout: dict[str, Any], deadline: GroupDeadline | None) -> None:
    assert GroupDeadline.of(config_of("model", rollout=rollout).rollout, now=100.0) == deadline
