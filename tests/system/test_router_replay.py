"""Whole runs of a mixture of experts whose trainer replays the experts that the engines chose."""

from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.queue.dump import read_batch
from megarl.queue.routes import Routes
from megarl.rollout.resume.journal import JOURNAL_FILE
from megarl.rollout.resume.journal_file import JournalFile
from megarl.rollout.resume.journal_records import decode_unfinished, read_head
from tests.support.runs.run import ON_POLICY_MAX, ON_POLICY_MEAN, Run, second_thoughts, tiny_config, train
from tests.support.runs.whole_runs import JOURNAL_S, actors, killed_after, start_run, wait_for
from tests.support.trainer.configs import with_changes

pytestmark = pytest.mark.engine
MIXTURE = {"num_hidden_layers": 6, "num_experts": 32, "num_experts_per_tok": 4, "mlp_only_layers": [1]}
WIDE = {**MIXTURE, "hidden_size": 128, "moe_intermediate_size": 64, "mlp_only_layers": []}
R3 = {"trainer__router_replay": "r3"}


def run_config(
    directory: Path, model: dict[str, Any] = MIXTURE, family: str = "qwen3_moe", **changes: Any
) -> dict[str, Any]:
    return with_changes(tiny_config(directory, family=family, **model), changes)


def run(tree: dict[str, Any]) -> Run:
    return sound(train(tree), tree)


def sound(done: Run, tree: dict[str, Any]) -> Run:
    assert done.code == 0, done.output[-4000:]
    assert [record["step"] for record in done.metrics] == list(range(1, tree["run"]["steps"] + 1))
    assert not any(record["batch/failed_samples"] for record in done.metrics)
    return done


def assert_exact(done: Run) -> None:
    for record in done.metrics:
        assert record["policy/grad_norm"] > 0
        assert record["mismatch/logprob_abs_diff_mean"] <= ON_POLICY_MEAN
        assert record["mismatch/logprob_abs_diff_max"] <= ON_POLICY_MAX


CASES: dict[str, dict[str, Any]] = {
    "context": {"trainer__parallel": {"context": 2, "expert": 2}},
    "sequence": {"trainer__parallel": {"tensor": 2, "sequence": True}},
    "pipeline": {"trainer__parallel": {"pipeline": 2}},
    "shared GPUs": {"rollout__share_gpus": True},
}


@pytest.mark.parametrize("case", ["experts", *(pytest.param(each, marks=pytest.mark.slow) for each in CASES)])
def test_the_trainer_computes_what_the_engines_did(tmp_path: Path, case: str) -> None:
    """In parts that agent workers pass on, with layers computed again."""
    tree = run_config(
        tmp_path, **R3, trainer__recompute="full", rollout__agent_workers=1, rollout__report_interval_s=0.05,
        run__steps=3, **CASES.get(case, {"trainer__parallel": {"expert": 2}}),
    )  # fmt: skip
    assert_exact(run(tree))


@pytest.mark.slow
def test_so_it_does_next_to_delta_net(tmp_path: Path) -> None:
    """Its engines have no prefix cache on a CPU."""
    sizes = {"num_hidden_layers": 4, "moe_intermediate_size": 64}
    assert_exact(run(run_config(tmp_path, sizes, "qwen3_5_moe", **R3, trainer__parallel={"expert": 2})))


@pytest.mark.slow
def test_so_it_does_in_a_dialogue(tmp_path: Path) -> None:
    """The second turn's request asks only for the experts that the first has not returned."""
    tree, _ = second_thoughts(tmp_path, family="qwen3_moe", **MIXTURE)
    done = run(with_changes(tree, {**R3, "trainer__parallel": {"expert": 2}}))
    assert_exact(done)
    assert all(record["agent/turns_mean"] == 2 for record in done.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["every process", "controller"])
def test_a_run_goes_on_with_the_experts_of_its_journal(tmp_path: Path, victim: str) -> None:
    """Killed in the middle of responses. What the journal has of them stays, experts included."""
    tree = run_config(
        tmp_path, **R3, trainer__parallel={"context": 2, "expert": 2}, trainer__micro_batch_tokens=1024,
        run__steps=3, checkpoint__every=1, telemetry={"dump_batches": True}, sampling__max_tokens=200,
        rollout={"max_num_seqs": 4, "journal_s": JOURNAL_S, "report_interval_s": 0.05},
    )  # fmt: skip
    run_dir = tmp_path / "run"
    process = start_run(tree)
    with killed_after(process, run_dir):
        wait_for(lambda: bool(CheckpointDirectory(run_dir / "checkpoints").steps()) and bool(begun(run_dir)), process)
        if victim == "controller":
            [controller] = actors(run_dir, "RolloutController")
            controller.kill()
            kept = begun(run_dir)
            output, _ = process.communicate(timeout=600)
            done = sound(Run(process.returncode, output, run_dir), tree)
    if victim != "controller":
        kept = begun(run_dir)
        done = run(tree)
    assert_exact(done)
    rows = [row for step in range(3) for row in read_batch(run_dir / "batches", step).trajectories]
    whole = {place: row.routes for row in rows if (place := (row.group_id, row.sample_index)) in kept}
    assert whole and all(
        routes is not None and routes.of(0, len(kept[place])) == kept[place] for place, routes in whole.items()
    )
    assert any(len(kept[place]) < len(routes or ()) for place, routes in whole.items()), "all were complete"


def begun(run_dir: Path) -> dict[tuple[int, int], Routes]:
    """The experts that the journal has of each response (group, sample) of the second step that has not ended."""
    found: dict[tuple[int, int], Routes] = {}
    for record in JournalFile(run_dir / JOURNAL_FILE).read():
        if (head := read_head(record))["kind"] != "unfinished" or head["group"] < 4:
            continue
        for (sample, _), response in decode_unfinished(record).responses.items():
            if response.tokens.routes is not None and response.tokens.finish_reason is None:
                found[head["group"], sample] = response.tokens.routes
    return found


@pytest.mark.slow
def test_in_bf16_what_is_left_is_far_less(tmp_path: Path) -> None:
    """Routers of nearly equal scores choose other experts in the trainer, unless they replay the engine's."""
    free, replayed = (
        run(
            run_config(
                tmp_path / mode, WIDE, trainer__router_replay=mode, trainer__precision="bf16", sampling__max_tokens=48
            )
        )
        for mode in ("none", "r3")
    )
    for before, after in zip(free.metrics, replayed.metrics, strict=True):
        assert after["mismatch/k3_kl"] <= before["mismatch/k3_kl"] / 10
        assert after["mismatch/logprob_abs_diff_max"] <= before["mismatch/logprob_abs_diff_max"] / 5
