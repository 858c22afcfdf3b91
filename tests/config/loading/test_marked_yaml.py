"""The resolved config of a dry run: what the user has set are lines, defaults are comments."""

from pathlib import Path

from megarl.config.loading.load import config_from_tree, load_config
from megarl.config.memory_plan.plan_tables import WIDTH, marked_yaml
from tests.support.trainer.configs import tree


def test_lines_are_what_is_set_and_comments_the_rest(tmp_path: Path) -> None:
    sets = [{"name": "held", "path": "held.jsonl", "limit": 3}]
    given = config_from_tree(tree("model", trainer__parallel={"tensor": 1}, evaluation__sets=sets, algorithm={}))
    resolved = given.model_copy(update={"trainer": given.trainer.model_copy(update={"recompute": "none"})})
    text = marked_yaml(given, resolved)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert lines == [
        "run:", "  name: test", "  steps: 4", "model:", "  path: model", "trainer:", "  gpus: 1", "  parallel:",
        "    tensor: 1", "  micro_batch_tokens: 256", "  precision: fp32",
        "  recompute: none  # the plan's choice for auto", "batch:", "  groups: 4", "  samples_per_group: 4",
        "sampling:", "  max_tokens: 32", "data:", "  path: prompts.jsonl", "  max_prompt_tokens: 32", "evaluation:",
        "  sets:", "  - name: held", "    path: held.jsonl", "    limit: 3",
    ]  # fmt: skip
    assert (
        "    # default: context: 1, pipeline: 1, expert: 1, sequence: false\n"
        "    # expert default: virtual_pipeline: null"
    ) in text
    assert "\n# algorithm: {advantage: grpo" in text and max(map(len, text.splitlines())) <= WIDTH
    path = tmp_path / "again.yaml"
    path.write_text(text)
    assert load_config(path) == resolved
