"""Basic and expert keys: each basic one exists, and pages and printed configs have them first."""

import re

from megarl.config.loading.load import BASIC, config_from_tree, level, ordered, walk_keys
from megarl.config.memory_plan.plan_tables import marked_yaml
from megarl.config.schema import Config, RolloutConfig
from tests.support.trainer.configs import tree
from tools.docs.options import keys_page


def test_every_basic_key_exists() -> None:
    assert set(walk_keys()) >= BASIC and len(BASIC) < 50


def test_there_are_no_more_keys_than_a_reader_can_look_through() -> None:
    rows = re.findall(r"^\| `\w+` \| (?:basic|expert) \|", keys_page(), re.MULTILINE)
    assert 200 < len(rows) <= 250


def test_a_section_is_basic_if_a_key_of_it_is() -> None:
    assert (level("trainer"), level("trainer.parallel"), level("trainer.parallel.tensor")) == ("basic",) * 3
    assert (level("monitor"), level("trainer.parallel.expert_tensor"), level("tool")) == ("expert",) * 3
    assert ordered(RolloutConfig, "rollout.")[:2] == ["replicas", "tensor_parallel"]
    assert ordered(Config)[:2] == ["run", "model"] and ordered(Config).index("launch") < ordered(Config).index(
        "monitor"
    )


def test_a_printed_config_has_basic_keys_first() -> None:
    given = config_from_tree(tree("model", rollout={"max_num_seqs": 8, "replicas": 2}))
    text = marked_yaml(given, given)
    assert "rollout:\n  replicas: 2\n  max_num_seqs: 8\n  # default: tensor_parallel: 1, gpus_per_node: null, " in text
    assert "\n  # expert default: max_replicas: null, " in text
    for start in ("", "# "):  # sections that are set, and below them those that are not
        order = re.findall(rf"^{start}(\w+):", text, re.MULTILINE)
        assert order == [name for name in ordered(Config) if name in order] and len(order) > 5
