"""The shell commands of the pages, as pasted, where the names that they use stand for small runs, models and files.

LEFT_OUT needs a GPU, a cluster, a model hub, a terminal or a living run; tests/test_page_commands.py parses it. A run
is made small by overrides after its command. The tutorials have tests of their own (test_examples.py).
"""

import json
import re
import shutil

import pytest

from tests.support.checkout import ROOT
from tests.support.models.tiny import make_tiny_model
from tests.support.runs.tutorials import Checkout
from tests.test_page_commands import commands_of

pytestmark = [pytest.mark.slow, pytest.mark.engine]

GUIDES = (
    "quickstart configuration training training/async checkpoints observability shared-gpus scaling scaling/recipes"
)
PAGES = ("README.md", *(f"docs/{name}.md" for name in GUIDES.split()))
LEFT_OUT = re.compile(
    r"\.|make |hf |pip |sbatch |megarl (?:pool|doctor)|megarl top \S+(?:$| +#)|megarl launch --config my.yaml$"
    r"|.*--nproc-per-node [48]|python -m megarl\."
)
QUICKSTART = "python -m examples.quickstart"
SMALL = (
    "batch.groups=4", "batch.samples_per_group=4", "sampling.max_tokens=12", "algorithm.filter_zero_variance=false",
    "telemetry.dump_batches=true", "trainer.precision=fp32", "checkpoint.every=1",
)  # fmt: skip
OUTPUTS = {"out", "Qwen3-8B-megatron"}  # which a conversion does not overwrite


def overrides(command: str) -> list[str]:
    """What makes a command small: of the quickstart five steps, which a page replays, of other runs one."""
    if command.startswith(QUICKSTART):
        return ["--warm-start-steps", "2"]
    trains = command.startswith("megarl train") or "train_rl.py" in command
    if not trains or "--dry-run" in command:
        return []
    few = "[{name: additions, path: heldout.jsonl}]" if "quickstart_cpu" in command else "[]"
    return [*SMALL, f"evaluation.sets={few}", f"run.steps={5 if command.startswith('torchrun') else 1}"]


def shown(page: str, kind: str, beginning: str) -> str:
    """The block of a page that begins so."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if block.startswith(beginning))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with the user's files as the README shows them, and a run of the quickstart under several names."""
    checkout = Checkout(tmp_path_factory.mktemp("pages") / "checkout")
    directory = checkout.directory
    for name in ("tools", "launch"):
        (directory / name).symlink_to(ROOT / name)
    for name in ("models/Qwen3-0.6B", "Qwen3-8B"):
        make_tiny_model(directory / name, max_position_embeddings=4096)
    (directory / "my.yaml").write_text(
        shown("README.md", "yaml", "# my.yaml") + shown("README.md", "yaml", "# in my.y")
    )
    (directory / "my_rewards.py").write_text(shown("README.md", "python", "def score"))
    row = json.loads(shown("README.md", "json", "{"))
    (directory / "my").mkdir()
    (directory / "my/prompts.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    tests = [{"question_text": "What is 2 + 3?", "gold": "5"}, {"question_text": "What is 4 + 3?", "gold": "7"}]
    (directory / "my/test.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in tests))
    for name in ("heldout", "test"):
        problems = [{"problem": each["question_text"], "answer": each["gold"]} for each in tests]
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in problems))
    for command in commands_of((ROOT / "docs/quickstart.md").read_text())[2:4]:
        checkout.call(command, *overrides(command), timeout_s=1500)
    run = directory / "runs/quickstart"
    shutil.copytree(run / "batches", run / "failed_batch")
    for name in ("RUN_DIR", "runs/first", "runs/second", "runs/other"):
        (directory / name).symlink_to(run)
    command = "megarl train --config my.yaml"
    checkout.call(command, *overrides(command), timeout_s=900)
    checkpoints = directory / "runs/my/checkpoints"
    (checkpoints / "iter_0000100").symlink_to(checkpoints / "iter_0000001")
    return checkout


def chosen() -> list[object]:
    found = [(page, command) for page in PAGES for command in commands_of((ROOT / page).read_text())]
    unique = dict.fromkeys((page, command) for page, command in found if not LEFT_OUT.match(command))
    return [pytest.param(command, id=f"{page}: {command[:60]}") for page, command in unique]


@pytest.mark.parametrize("command", chosen())
def test_a_command_runs_as_pasted(place: Checkout, command: str) -> None:
    for name in OUTPUTS & {*re.findall(r"--(?:out|hf) (\S+)", command)}:
        shutil.rmtree(place.directory / name, ignore_errors=True)
    if not command.startswith(QUICKSTART):  # the fixture has made it
        place.call(command, *overrides(command), timeout_s=900)
