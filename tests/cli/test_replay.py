"""`megarl replay`: recorded batches give the very weights that the step gave on the trajectories in memory."""

import io
import json
import shutil
from pathlib import Path

import pytest

from megarl import platforms
from megarl.cli import replay
from megarl.cli.main import main
from megarl.cli.replay import ScheduledStep, choose_steps, read_schedule, replay_config, replay_steps
from megarl.common.errors import ConfigError
from megarl.config.derived.staleness import Pace, pace_of
from megarl.config.loading.load import load_config, to_yaml
from megarl.queue.dump import DumpError, read_batch, write_batch
from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.admission_log import SCHEDULE_FILE, Event
from megarl.rollout.orchestrator.prompt_groups import usable_samples
from megarl.run.step.plan import plan_step
from megarl.trainer import parallel
from tests.support.losses.rl_problem import make_config
from tests.support.models.tensors import Tensors, read_hf
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.recorded_steps import (
    GROUPS,
    SAMPLES,
    STALE,
    STALE_AND_FAILED,
    STEPS,
    UPDATES,
    make_batch,
    make_batch_with_drops,
    version_of,
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A run directory as a run leaves it: config and batches."""
    root = tmp_path_factory.mktemp("replay")
    model = make_tiny_model(root / "model")
    config = make_config(
        model,
        run__dir=root / "run",
        run__steps=STEPS,
        batch__groups=GROUPS,
        batch__samples_per_group=SAMPLES,
        algorithm__kl__coef=0.0,
        trainer__mini_batches=UPDATES,
        telemetry__tensorboard=False,
    )
    (root / "run").mkdir()
    (root / "run" / "config.yaml").write_text(to_yaml(config))
    for step in range(STEPS):
        write_batch(root / "run" / "batches", step, version_of(step), make_batch(step))
    return root / "run"


def distance(a: Tensors, b: Tensors) -> float:
    """||a - b|| over all tensors together."""
    assert a.keys() == b.keys()
    return sum(float((a[name] - b[name]).double().square().sum()) for name in a) ** 0.5


@pytest.mark.parametrize(("local_rank", "index"), [("3", 3), (None, 0)])
def test_a_replaying_rank_chooses_its_gpu_before_it_joins_its_peers(monkeypatch, tmp_path, local_rank, index):
    class Stopped(Exception):
        pass

    order = []

    def activate(index):
        order.append(index)
        raise Stopped

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(replay, "_init_process_group", lambda *arguments: order.append("joins"))
    monkeypatch.setattr(platforms, "activate", activate)
    with pytest.raises(Stopped):
        replay._train(replay._Replay(make_config(tmp_path), tmp_path, [0], {}, None, False), io.StringIO())
    assert order == [index]


def test_ranks_that_read_different_batches_train_on_nothing(recorded, monkeypatch):
    """Each rank reads the files by itself, from a directory that may not be the same one on every host."""
    monkeypatch.setattr(parallel, "dp_size", lambda: 2)
    monkeypatch.setattr(parallel, "dp_all_gather_object", lambda own, codec: [own, "that of another file"])
    config = load_config(recorded / "config.yaml")
    with pytest.raises(RuntimeError, match=r"the ranks read different batches of step 0 from .*; is it shared\?"):
        replay_steps(None, config, recorded / "batches", [0])  # there is no policy that it could train


def test_replay_repeats_the_steps_on_one_rank_and_two(recorded, world):
    in_memory = world(1).run("tests.support.ranks.checkpoints.replay:train_in_memory", run_dir=recorded, steps=STEPS)[0]
    replayed = world(1).run("tests.support.ranks.checkpoints.replay:replay", run_dir=recorded, steps=STEPS)[0]
    assert in_memory["metrics"] == replayed["metrics"]
    assert len(replayed["metrics"]) == STEPS
    # Group 1 lost its only correct sample, so nothing tells its others apart.
    assert replayed["metrics"][0]["groups/trained"] == GROUPS - 1
    assert replayed["metrics"][0]["groups/filtered"] == 1
    assert replayed["metrics"][0]["batch/failed_samples"] == 1
    assert distance(in_memory["weights"], replayed["weights"]) == 0.0
    start = read_hf(recorded.parent / "model")
    moved = distance(start, replayed["weights"])
    assert moved > 0.01
    for layout in ({"tensor": 2}, {}):
        parts = world(2).run(
            "tests.support.ranks.checkpoints.replay:replay", run_dir=recorded, steps=STEPS, layout=layout
        )
        joined = {name: value for part in parts for name, value in part["weights"].items()}
        assert distance(joined, replayed["weights"]) / moved < 1e-4
    # A replay of fewer steps is another policy: the comparison can fail.
    shorter = world(1).run("tests.support.ranks.checkpoints.replay:replay", run_dir=recorded, steps=STEPS - 1)[0]
    assert distance(shorter["weights"], replayed["weights"]) / moved > 0.05


@pytest.fixture(scope="module")
def dropping(recorded, tmp_path_factory) -> Path:
    """The run with a stale group in its second step, alongside one that is as old and has failed; it has a schedule.

    Admission leaves nothing for the trainer to drop, so here it has not heard of the old tokens.
    """
    run = tmp_path_factory.mktemp("dropping") / "run"
    run.mkdir()
    shutil.copy(recorded / "config.yaml", run)
    config = load_config(run / "config.yaml")
    events: list[Event] = []
    admission = Admission(GROUPS, pace_of(config), record=events.append)
    admission.load_state_dict(admission.state_dict())
    for step in range(STEPS):
        admission.set_version(version_of(step))
        batch = make_batch_with_drops(step)
        for group in admission.admit():
            usable = usable_samples(row.status for row in batch if row.group_id == group)
            admission.finish(group, usable, {version_of(step)})
        assert admission.batch(step) is not None
        plan = plan_step([row.tag for row in batch], config, dp_size=1, version=version_of(step))
        admission.commit(step, **vars(plan.outcome), trained_groups=plan.trained_groups, ended=plan.ended)
        write_batch(run / "batches", step, version_of(step), batch)
    write_schedule(run, events)
    return run


def test_replay_drops_the_groups_that_the_trainer_has_dropped(dropping, world):
    config = load_config(dropping / "config.yaml")
    for step in range(STEPS):
        tags = [row.tag for row in make_batch_with_drops(step)]
        plan = plan_step(tags, config, dp_size=1, version=version_of(step))
        assert replay._plan(read_batch(dropping / "batches", step), config, [], [], dp_size=1) == plan
        assert plan.ended["dropped_stale"] == [STALE] * (step == 1)
        assert plan.ended["failed"] == [STALE_AND_FAILED] * (step == 1)
    ran = world(1).run(
        "tests.support.ranks.checkpoints.replay:train_in_memory", run_dir=dropping, steps=STEPS, drops=True
    )[0]
    replayed = world(1).run("tests.support.ranks.checkpoints.replay:replay", run_dir=dropping, steps=STEPS)[0]
    assert replayed["metrics"] == ran["metrics"]
    assert [values["groups/dropped_stale"] for values in ran["metrics"]] == [0, 1, 0]
    assert [values["groups/trained"] for values in ran["metrics"]] == [GROUPS - 1, GROUPS - 2, GROUPS]
    assert distance(ran["weights"], replayed["weights"]) == 0.0
    whole = world(1).run("tests.support.ranks.checkpoints.replay:train_in_memory", run_dir=dropping, steps=STEPS)[0]
    assert distance(whole["weights"], replayed["weights"]) > 0, "the groups that were dropped make no difference"


def test_config_of_the_run_with_overrides(recorded, tmp_path):
    config = replay_config(recorded, tmp_path / "out", ["trainer.optimizer.lr=1e-5"])
    assert config.trainer.optimizer.lr == 1e-5 and config.run_dir == tmp_path / "out"
    assert replay_config(recorded, None, []).run_dir == recorded / "replay"
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        replay_config(tmp_path, None, [])


def test_steps_with_a_gap_or_none_are_refused(recorded, tmp_path):
    assert choose_steps(recorded / "batches", 2) == [0, 1]
    assert choose_steps(recorded / "batches", None) == [0, 1, 2]
    with pytest.raises(DumpError, match="--steps: 0"):
        choose_steps(recorded / "batches", 0)
    with pytest.raises(DumpError, match="dump_batches=true"):
        choose_steps(tmp_path, None)
    shutil.copytree(recorded / "batches", tmp_path / "batches")
    (tmp_path / "batches" / "step_000001.0-of-1.parquet").unlink()
    with pytest.raises(DumpError, match="step 1 is missing"):
        choose_steps(tmp_path / "batches", None)


def schedule_of(steps: int) -> list[Event]:
    """Return what the recorded run would have recorded, with groups of each version finishing in order."""
    events: list[Event] = []
    admission = Admission(GROUPS, Pace(2, 2, 1), record=events.append)
    admission.load_state_dict(admission.state_dict())
    for step in range(steps):
        admission.set_version(2 * step)
        for group in admission.admit():
            admission.finish(group, True, {2 * step})
        admission.batch(step)
    return events


def write_schedule(run: Path, events: list[Event]) -> None:
    (run / SCHEDULE_FILE).write_text("".join(json.dumps(event) + "\n" for event in events))


def test_the_steps_of_a_schedule_are_those_of_its_last_history(tmp_path):
    assert read_schedule(tmp_path / SCHEDULE_FILE) == {}
    events = schedule_of(2)
    commit = {"event": "commit", "step": 0, "trained": 3}
    begin = {"event": "begin", "state": {"steps": 1}}
    held = {"step": 1, "replaced": [4], "reused": [(2, 0, 1)]}
    write_schedule(tmp_path, [*events, commit, begin])
    assert read_schedule(tmp_path / SCHEDULE_FILE) == {0: ScheduledStep([], [], 3)}
    write_schedule(tmp_path, [*events, commit, begin, {"event": "hold", "taken": [held]}])
    assert read_schedule(tmp_path / SCHEDULE_FILE)[1] == ScheduledStep([4], [2])


def test_options_that_drop_a_group_which_was_trained_before_are_one_message(recorded, tmp_path, monkeypatch):
    """Group 1 has no signal, so that the run cannot have trained it."""
    monkeypatch.setattr(parallel, "dp_size", lambda: 1)
    schedule = {0: ScheduledStep([], [1])}
    reusing = ["admission.mode=async", "admission.sync_interval=2", "admission.max_staleness=3", "admission.max_uses=2"]
    config = replay_config(recorded, tmp_path / "out", reusing)
    with pytest.raises(DumpError, match=r"step 0: group 1 was trained .* no signal .*; with admission.max_uses=1 a"):
        replay_steps(None, config, recorded / "batches", [0], schedule=schedule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run-dir", "nowhere"], "nowhere has no config.yaml"),
        (
            ["--run-dir", "{run}", "trainer.gpus=2"],
            "torchrun --rdzv-backend megarl --nproc-per-node 2 -m",
        ),
        (["--run-dir", "{run}", "--batches", "nowhere"], "no recorded batch"),
        (["--run-dir", "{run}", "trainer.nonsense=2"], "trainer.nonsense: no such key"),
        (["--run-dir", "{run}", "--out", "{run}"], "is the recorded run itself"),
        (["--run-dir", "{run}", "--out", "{run}/batches"], "batches holds"),
    ],
)
def test_mistakes_end_with_one_message(recorded, arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["replay", *(argument.format(run=recorded) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("megarl: ") and "Traceback" not in error


def test_batches_of_other_data_sets_are_refused_before_anything_is_trained(recorded, tmp_path):
    config = replay_config(recorded, None, [])
    [path] = [config.data.path]
    sets = [{"name": "sums", "path": str(path)}]
    other = replay_config(recorded, None, ["data.path=null", f"data.sets={json.dumps(sets)}"])
    with pytest.raises(DumpError, match=r"step 0 has samples of data set '', but the config has \['sums'\]"):
        replay_steps(None, other, recorded / "batches", [0])


@pytest.mark.parametrize(
    "command",
    [
        "-m megarl replay --run-dir r --steps 5 --out o --batches b --checkpoint c --export",
        "examples/rl/train_rl.py --config c.yaml --dry-run --resume auto --dump-batches run.steps=1",
        "tools/checkpoint/convert.py import --hf a --out b --dtype bfloat16 --workers 2 --resume --force",
    ],
)
def test_torchrun_leaves_our_options_alone(command: str) -> None:
    """Its parser refuses any option, ours too, that begins several of its own: `--run` did."""
    from torch.distributed.run import get_args_parser

    first, *rest = command.split()
    script = rest.pop(0) if first == "-m" else first
    arguments = get_args_parser().parse_args(["--nproc-per-node", "2", *command.split()])
    assert (arguments.training_script, arguments.training_script_args) == (script, rest)
