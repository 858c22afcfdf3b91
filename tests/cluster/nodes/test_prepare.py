"""The start and the end of a launch, without the job between."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from megarl.cluster.nodes.node_files import NodeBoard, NodeFailure
from megarl.cluster.nodes.prepare import local_allocation, prepare, status
from megarl.cluster.nodes.spec import LaunchSpec
from megarl.common.errors import ConfigError
from megarl.common.process.processes import ProcessId
from megarl.common.rundir import run_files as stopping
from megarl.common.rundir.run_files import ExitRecord
from megarl.common.rundir.run_lock import CLAIM_FILE, Holder
from megarl.config.loading.load import config_from_tree
from megarl.config.schema import Config
from tests.support.trainer.configs import tree, write_problems

HERE = local_allocation(("127.0.0.1",))


@pytest.fixture
def chosen(model: Path, tmp_path: Path) -> Config:
    data = write_problems(tmp_path / "prompts.jsonl", 1)
    timeouts = {"node_s": 1.0}  # a start with --force waits that long for a holder that does not end
    return config_from_tree(tree(model, data, run__dir=str(tmp_path / "run"), timeouts=timeouts))


def test_what_all_nodes_read_and_what_is_forgotten(chosen: Config) -> None:
    run_dir = chosen.run_dir
    run_dir.mkdir()
    stopping.ask_to_stop(run_dir, "an earlier launch")
    stopping.write_exit(run_dir, ExitRecord("preempted", 2, "an earlier launch"))
    spec = prepare(chosen, HERE, "7-1")
    assert LaunchSpec.load(spec.path) == spec
    assert spec.config == chosen and spec.run_dir == run_dir.resolve() and spec.steps_before == 2
    assert stopping.stop_reason(run_dir) is None and stopping.read_exit(run_dir) is None
    killed = f"the job was killed before it could report a reason; see {spec.run_dir / 'logs'}"
    assert status(spec) == ("failed", killed)
    assert stopping.read_exit(run_dir) == ExitRecord("failed", 2, killed)


FOUR_NODES = {
    "trainer": {"gpus": 2, "gpus_per_node": 1, "precision": "fp32", "micro_batch_tokens": 256},
    "rollout": {"replicas": 2, "gpus_per_node": 1},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data__path": "none.jsonl"}, "no such file: none.jsonl"),
        ({"trainer__gpus": 3, "trainer__parallel": {"tensor": 2}}, "trainer.gpus"),
        (FOUR_NODES, "the job has 1 (127.0.0.1), the config needs 4"),
    ],
)
def test_mistakes_end_before_anything_is_written(
    model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data = write_problems(tmp_path / "prompts.jsonl", 1)
    wrong = config_from_tree(tree(model, data, run__dir=str(tmp_path / "run"), **change))
    with pytest.raises(ConfigError) as caught:
        prepare(wrong, HERE, "1")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_every_end_is_reported(chosen: Config) -> None:
    spec = prepare(chosen, HERE, "1")
    run_dir = spec.run_dir
    stopping.write_exit(run_dir, ExitRecord("finished", 4, ""))
    assert status(spec) == ("finished", "finished after 4 of 4 steps")
    stopping.write_exit(run_dir, ExitRecord("preempted", 3, "time limit"))
    assert status(spec) == ("preempted", "preempted after 3 of 4 steps: time limit")
    stopping.write_exit(
        run_dir, ExitRecord("preempted", 3, "time limit; the checkpoint of step 5 could not be saved", 2)
    )
    assert status(spec) == (
        "unsaved",
        "stopped after 3 of 4 steps; 2 more were trained and are lost: time limit; the checkpoint of step 5 could not "
        "be saved; the same command resumes after step 3",
    )
    stopping.write_exit(run_dir, ExitRecord("failed", 3, "loss is NaN"))
    assert status(spec) == ("failed", "loss is NaN")
    NodeBoard(Path(spec.directory)).claim_failure(NodeFailure("n7", "GPU fell off"))
    assert status(spec) == ("failed", "node n7 failed: GPU fell off")


def test_a_damaged_exit_record_is_no_reason_to_train_again(chosen: Config) -> None:
    spec = prepare(chosen, HERE, "1")
    (spec.run_dir / stopping.EXIT_FILE).write_text("{")
    word, text = status(spec)
    assert word == "failed" and "exit.json is damaged" in text and "see RUN_DIR/logs" in text
    again = prepare(chosen, HERE, "2")
    assert again.steps_before == 0 and not (spec.run_dir / stopping.EXIT_FILE).exists()


def test_the_exit_record_of_a_run_that_has_taken_the_directory_is_left_alone(chosen: Config) -> None:
    spec = prepare(chosen, HERE, "1")
    NodeBoard(Path(spec.directory)).claim_failure(NodeFailure("n7", "the directory was taken"))
    other = Holder.here("megarl launch", ProcessId.own(), "2")
    (spec.run_dir / CLAIM_FILE).write_bytes(msgspec.json.encode(other))
    word, text = status(spec)
    assert word == "failed" and stopping.read_exit(spec.run_dir) is None
    assert text.startswith(f"node n7 failed: the directory was taken; {spec.run_dir} is now held by megarl launch")
    stopping.write_exit(spec.run_dir, ExitRecord("finished", 4, ""))
    assert status(spec)[0] == "failed"
    assert (spec.run_dir / CLAIM_FILE).exists()


def test_a_run_that_does_no_step_before_its_time_limit_is_not_started_forever(chosen: Config) -> None:
    first = prepare(chosen, HERE, "1")
    stopping.write_exit(first.run_dir, ExitRecord("preempted", 2, "time limit"))
    assert status(first)[0] == "preempted"
    second = prepare(chosen, HERE, "2")
    stopping.write_exit(second.run_dir, ExitRecord("preempted", 2, "time limit"))
    word, text = status(second)
    assert word == "failed" and "no step of this launch is saved" in text


def test_a_run_directory_in_use_is_refused(chosen: Config) -> None:
    prepare(chosen, HERE, "1")  # its holder is this process's parent, which lives
    with pytest.raises(ConfigError, match=r"is in use by megarl launch .* launch 1"):
        prepare(chosen, HERE, "2")
    prepare(chosen, HERE, "2", force=True)
