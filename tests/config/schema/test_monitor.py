"""Rules of the monitor: what is not given keeps its default, and what a rule cannot have is refused."""

import re
from typing import Any

import pytest

from megarl.common.errors import ConfigError
from megarl.config.schema.monitor import RULES
from tests.support.trainer.configs import config


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"ess": {"threshold": 1.0}}, "ess.threshold is 1; it must be above 0 and below 1"),
        ({"replica_gap": {"threshold": 1}}, "replica_gap.threshold is 1; it must be above 1"),
        ({"replica_gap": {"action": "skip"}}, "replica_gap.action is skip; this rule has off, warn, quarantine, stop"),
        ({"ess": {"action": "quarantine"}}, "ess.action is quarantine; this rule has off, warn, skip, sync, stop"),
        ({"kl": {"threshold": 1.0}}, "monitor.rules.kl"),
        ({"ess": {"treshold": 1.0}}, "monitor.rules.ess.treshold"),
    ],
)
def test_a_rule_has_only_possible_values(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config("model", monitor={"rules": rules})


def test_a_rule_keeps_the_defaults_of_what_is_not_given() -> None:
    rules = config("model", monitor__rules__ess={"action": "stop"}).monitor.rules
    assert rules["ess"].model_dump() == {"threshold": 0.3, "patience": 3, "action": "stop"}
    assert rules.keys() == RULES.keys()
