"""The loop, with parts that note their calls: what happens in which order, and for which step and version."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import RolloutError
from megarl.run.loop.loop import MOST_PUBLICATIONS, train
from megarl.run.loop.monitor import AlarmStopsRun, RunMonitor
from megarl.run.loop.session import Session
from megarl.trainer.policy import NonFiniteError
from tests.support.trainer.configs import config as config_of
from tests.support.trainer.fake_session import FakeRun, fake_run
from tests.support.trainer.old_records import OLD_RECORD

SETS = [{"name": "held_out", "path": "held_out.jsonl"}]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRun]:
    def make(steps: int, **changes: Any) -> FakeRun:
        settings = {"run__dir": str(tmp_path), "run__export": False, "evaluation__sets": SETS} | changes
        return fake_run(config_of("model", run__steps=steps, **settings), monkeypatch)

    return make


def journal_of_training(run: FakeRun) -> list[str]:
    """Build the session, train, and return what training did."""
    session = run.build()
    run.journal.clear()
    train(session)
    return run.journal


def test_the_order_of_a_run(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(2)
    run.due = {2}
    assert journal_of_training(run) == [
        "announce 0",
        "publish 0",
        "record sync of version 0",
        "set version 0",
        "evaluate before of version 0",
        "record before at 0 of version 0: ['report of version 0']",
        "start the clock",
        "admit 0",
        "take batch 0 for version 0",
        "fetch plan for version 0",
        "train plan for version 0",
        "write a sample of batch 0",
        "commit 0",
        "announce 1",
        "publish 1",
        "record sync of version 1",
        "set version 1",
        "record step 0 of plan for version 0, which made version 1",
        "poll the save",
        "admit 1",
        "take batch 1 for version 1",
        "fetch plan for version 1",
        "train plan for version 1",
        "write a sample of batch 1",
        "commit 1",
        "announce 2",
        "publish 2",
        "record sync of version 2",
        "set version 2",
        "record step 1 of plan for version 1, which made version 2",
        "poll the save",
        "save 2",
        "evaluate after of version 2",
        "record after at 2 of version 2: ['report of version 2']",
    ]


def test_shared_gpus_are_handed_over_with_each_batch_and_back_with_each_publication(
    make_run: Callable[..., FakeRun],
) -> None:
    """What a save needs is copied before the trainer's memory is given away; an export gets it again."""
    run = make_run(1, rollout__share_gpus=True, run__export=True)
    run.due = {1}
    publication = [
        "hold weights", "announce {0}", "publish {0}", "record sync of version {0}", "hold nothing",
        "engines generate", "set version {0}",
    ]  # fmt: skip
    all_parts = "hold frozen, gradients, optimizer, weights"
    assert journal_of_training(run) == [
        *(line.format(0) for line in publication),
        "evaluate before of version 0",
        "record before at 0 of version 0: ['report of version 0']",
        "start the clock",
        "admit 0",
        "take batch 0 for version 0",
        "fetch plan for version 0",
        "engines sleep",
        all_parts,
        "train plan for version 0",
        "write a sample of batch 0",
        "commit 0",
        "copy 1",
        *(line.format(1) for line in publication),
        "record step 0 of plan for version 0, which made version 1",
        "poll the save",
        "save 1",
        "evaluate after of version 1",
        "record after at 1 of version 1: ['report of version 1']",
        "engines sleep",
        all_parts,
        "export to hf",
    ]


def test_new_engines_get_weights_from_a_trainer_that_has_taken_the_shared_gpus_first(
    make_run: Callable[..., FakeRun],
) -> None:
    """If all engines are lost while the trainer is parked, its weights come back before they are published."""
    run = make_run(1, rollout__share_gpus=True)
    run.lost = {0: 1}
    journal = journal_of_training(run)
    begun = journal.index("admit 0")
    assert journal[begun + 1 : begun + 5] == [
        "engines sleep", "hold frozen, gradients, optimizer, weights", "hold weights", "announce 0",
    ]  # fmt: skip
    assert journal.index("take batch 0 for version 0") > journal.index("engines generate", begun)


STREAM = {"mode": "stream", "sync_interval": 3}
KEPT = ("engines", "hold", "copy", "save", "publish", "take", "evaluate")


def test_steps_up_to_the_next_publication_leave_the_engines_asleep(make_run: Callable[..., FakeRun]) -> None:
    """A save copies the trainer's state where it is; the last interval is shorter."""
    run = make_run(5, rollout__share_gpus=True, admission=STREAM, evaluation__sets=[])
    run.due = {2}
    run.timings = {1: {"rollout/replicas_lost": 1.0}}  # the engine that comes would not generate before step 3
    journal = [line for line in journal_of_training(run) if line.startswith(KEPT)]
    publication = ["hold weights", "publish {0}", "hold nothing", "engines generate"]
    trains = ["engines sleep", "hold frozen, gradients, optimizer, weights"]
    assert journal == [
        *(line.format(0) for line in publication),
        "take batch 0 for version 0", *trains,
        "take batch 1 for version 1", "copy 2", "save 2",
        "take batch 2 for version 2",
        *(line.format(3) for line in publication),
        "take batch 3 for version 3", *trains,
        "take batch 4 for version 4",
        *(line.format(5) for line in publication),
    ]  # fmt: skip


def test_an_evaluation_between_two_publications_makes_one_of_its_own(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(3, rollout__share_gpus=True, admission=STREAM, evaluation__every=2)
    journal = [line for line in journal_of_training(run) if line.startswith(KEPT)]
    at = journal.index("publish 2")
    assert journal[at + 2 : at + 7] == [
        "engines generate", "evaluate step_2 of version 2", "take batch 2 for version 2", "engines sleep",
        "hold frozen, gradients, optimizer, weights",
    ]  # fmt: skip


def test_a_stop_between_two_publications_saves_at_once(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(5, rollout__share_gpus=True, admission=STREAM)
    run.stop_after = {2: "the time limit is near"}
    journal = [line for line in journal_of_training(run) if line.startswith(KEPT)]
    assert journal[-2:] == ["take batch 1 for version 1", "save 2 and wait"]


def test_groups_that_the_pool_has_lost_while_engines_sleep_are_generated_after_a_publication(
    make_run: Callable[..., FakeRun],
) -> None:
    run = make_run(3, rollout__share_gpus=True, admission=STREAM, evaluation__sets=[])
    run.missing = {1: 1}
    journal = [line for line in journal_of_training(run) if line.startswith((*KEPT, "admit"))]
    begun = journal.index("admit 1")
    assert journal[begun : begun + 8] == [
        "admit 1", "hold weights", "publish 1", "hold nothing", "engines generate", "admit 1",
        "take batch 1 for version 1", "engines sleep",
    ]  # fmt: skip
    assert [line for line in journal if line.startswith("publish")] == ["publish 0", "publish 1", "publish 3"]


@pytest.mark.parametrize("stops_after", [1, 2])
def test_a_stop_takes_the_shared_gpus_for_its_save(make_run: Callable[..., FakeRun], stops_after: int) -> None:
    run = make_run(2, rollout__share_gpus=True)
    run.stop_after = {stops_after: "the time limit is near"}
    journal = journal_of_training(run)
    assert journal[-3:] == [
        "engines sleep", "hold frozen, gradients, optimizer, weights", f"save {stops_after} and wait",
    ]  # fmt: skip


def test_a_resumed_run_continues_with_the_step_and_the_version_of_its_checkpoint(
    make_run: Callable[..., FakeRun],
) -> None:
    """The version is not the step: it is published first, unchanged, and every step raises it by one."""
    run = make_run(5, evaluation__every=2)
    run.record = {**OLD_RECORD, "step": 3, "version": 7}
    journal = journal_of_training(run)
    assert journal[:3] == ["announce 7", "publish 7", "record sync of version 7"]
    assert journal[3:5] == ["set version 7", "start the clock"]
    taken = [line for line in journal if line.startswith("take")]
    assert taken == ["take batch 3 for version 7", "take batch 4 for version 8"]
    recorded = [line for line in journal if line.startswith("record") and " at " in line]
    assert recorded == [
        "record step_4 at 4 of version 8: ['report of version 8']",
        "record after at 5 of version 9: ['report of version 9']",
    ]
    assert [line for line in journal if line.startswith("publish")] == ["publish 7", "publish 8", "publish 9"]


@pytest.mark.parametrize(
    ("steps", "every", "labels"),
    [
        (5, 2, ["before at 0", "step_2 at 2", "step_4 at 4", "after at 5"]),
        (4, 2, ["before at 0", "step_2 at 2", "after at 4"]),  # the last step has one evaluation
        (2, 0, ["before at 0", "after at 2"]),
        (3, 1, ["before at 0", "step_1 at 1", "step_2 at 2", "after at 3"]),
    ],
)
def test_evaluations_are_labelled_by_the_steps_that_are_done(
    make_run: Callable[..., FakeRun], steps: int, every: int, labels: list[str]
) -> None:
    journal = journal_of_training(make_run(steps, evaluation__every=every))
    recorded = [line for line in journal if line.startswith("record ") and " at " in line]
    assert [line.removeprefix("record ").partition(" of ")[0] for line in recorded] == labels


def test_versions_count_updates_and_are_published_at_the_configs_interval(make_run: Callable[..., FakeRun]) -> None:
    """Two updates per step, four per publication; evaluations and the last step are of published weights."""
    run = make_run(7, trainer__mini_batches=2, admission={"mode": "stream", "sync_interval": 4}, evaluation__every=5,
                   evaluation__concurrent=False)  # fmt: skip
    journal = journal_of_training(run)
    assert [line for line in journal if line.startswith("take")] == [
        f"take batch {step} for version {2 * step}" for step in range(7)
    ]
    assert [line for line in journal if line.startswith("set version")] == [
        f"set version {version}" for version in (0, 4, 8, 10, 12, 14)
    ]
    recorded = [line for line in journal if line.startswith("record ") and " at " in line]
    assert [line.partition(":")[0].removeprefix("record ") for line in recorded] == [
        "before at 0 of version 0",
        "step_5 at 5 of version 10",
        "after at 7 of version 14",
    ]


def test_without_partial_rollouts_running_responses_end_before_each_publication(
    make_run: Callable[..., FakeRun],
) -> None:
    run = make_run(2, rollout__partial_rollout=False, admission={"mode": "one_step_off"})
    kinds = ("drain", "announce", "publish", "set version")
    found = [line for line in journal_of_training(run) if line.startswith(kinds)]
    assert found == [
        what
        for version in range(3)
        for what in ("drain", f"announce {version}", f"publish {version}", f"set version {version}")
    ]


def test_nothing_is_drained_for_a_publication_to_engines_that_sleep(make_run: Callable[..., FakeRun]) -> None:
    """What waits for them cannot end before it: of groups that a new controller has started, for example."""
    run = make_run(2, rollout__share_gpus=True, rollout__partial_rollout=False)
    found = [line for line in journal_of_training(run) if line.startswith(("drain", "engines", "publish"))]
    assert found == [
        "publish 0", "engines generate",
        "engines sleep", "publish 1", "engines generate",
        "engines sleep", "publish 2", "engines generate",
    ]  # fmt: skip


def test_lost_replicas_get_the_weights_out_of_turn(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(6, admission={"mode": "async", "sync_interval": 4, "max_staleness": 7}, evaluation__sets=[])
    run.timings = {1: {"rollout/replicas_lost": 1.0}}
    journal = journal_of_training(run)
    assert [line for line in journal if line.startswith("set version")] == [
        f"set version {version}" for version in (0, 2, 4, 6)
    ]


def test_an_evaluation_precedes_the_save_of_its_weights(make_run: Callable[..., FakeRun]) -> None:
    """`checkpoint.keep_best` compares the metrics that the checkpoint holds."""
    run = make_run(4, evaluation__every=2)
    run.due = {2}
    journal = journal_of_training(run)
    assert journal.index("evaluate step_2 of version 2") < journal.index("save 2")


def evaluations_added_by(run: FakeRun) -> dict[int, dict[str, float]]:
    """Train to the end of the run; return the evaluations that checkpoints were given after their save."""
    session = run.build()
    train(session)
    session.finish()
    return session.checkpointer.evaluations  # type: ignore[attr-defined, no-any-return]


def test_the_checkpoint_of_the_last_step_gets_its_evaluation_afterwards(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(4, evaluation__every=2)
    run.due = {2, 4}
    assert evaluations_added_by(run) == {4: {"eval/after": 4}}


def test_a_checkpoint_gets_the_evaluation_that_a_stop_had_ended(make_run: Callable[..., FakeRun]) -> None:
    """The run that resumes makes it with the weights of the checkpoint, before it trains them."""
    run = make_run(5, evaluation__every=2)
    run.record = {**OLD_RECORD, "step": 2, "version": 2, "evaluations": {"step_2": [2, 2]}}
    assert evaluations_added_by(run) == {2: {"eval/step_2": 2}, 5: {"eval/after": 5}}


def test_a_checkpoint_gets_no_evaluation_of_later_weights(make_run: Callable[..., FakeRun]) -> None:
    """The run stops after an evaluation, and cannot save the weights that were evaluated."""
    run = make_run(6, evaluation__every=2)
    run.due, run.failing_saves, run.stop_after = {2}, {4}, {4: "SIGTERM"}
    assert evaluations_added_by(run) == {}
    assert run.session is not None and run.session.steps_done == 2


ALONGSIDE = {"admission": {"mode": "async", "sync_interval": 1}, "evaluation__every": 2}


def evaluations_and_publications(journal: list[str]) -> list[str]:
    kinds = ("publish", "start evaluation", "evaluate", "save", "take batch")
    return [line for line in journal if line.startswith(kinds) or " at " in line]


def test_training_goes_on_while_an_evaluation_runs(make_run: Callable[..., FakeRun]) -> None:
    """None ends before somebody waits for it: the trainer does before the next one, and before the last publication."""
    journal = evaluations_and_publications(journal_of_training(make_run(5, **ALONGSIDE)))
    batches = [line for line in journal if line.startswith("take batch")]
    assert batches == [f"take batch {step} for version {step}" for step in range(5)]
    assert [line for line in journal if line not in batches] == [
        "publish 0",
        "evaluate before of version 0",
        "record before at 0 of version 0: ['report of version 0']",
        "publish 1",
        "publish 2",
        "start evaluation step_2 of version 2",
        "publish 3",
        "record step_2 at 2 (written at 4) of version 2: ['report of version 2']",
        "publish 4",
        "start evaluation step_4 of version 4",
        "record step_4 at 4 (written at 5) of version 4: ['report of version 4']",
        "publish 5",
        "evaluate after of version 5",
        "record after at 5 of version 5: ['report of version 5']",
    ]


def test_an_evaluation_that_has_ended_is_recorded_after_the_step(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(5, **ALONGSIDE)
    run.evaluated = True
    journal = journal_of_training(run)
    record = journal.index("record step_2 at 2 (written at 3) of version 2: ['report of version 2']")
    assert journal[record - 1] == "record step 2 of plan for version 2, which made version 3"


def test_a_resumed_run_begins_again_what_had_not_ended(make_run: Callable[..., FakeRun]) -> None:
    """An evaluation that a checkpoint does not name had ended, and is in the metrics up to it."""
    run = make_run(5, **ALONGSIDE)
    run.due = {3}
    journal_of_training(run)
    assert run.session is not None
    [saved] = run.session.checkpointer.saved.values()  # type: ignore[attr-defined]
    assert saved["evaluations"] == {"step_2": [2, 2]}
    again = make_run(5, **ALONGSIDE)
    again.record = {**OLD_RECORD, "step": 3, "version": 3, "evaluations": saved["evaluations"]}
    journal = evaluations_and_publications(journal_of_training(again))
    assert journal[:2] == ["publish 3", "start evaluation step_2 of version 3"]
    recorded = [line.partition(" of ")[0] for line in journal if " at " in line]
    assert recorded == ["record step_2 at 2 (written at 4)", "record step_4 at 4 (written at 5)", "record after at 5"]


def test_what_has_ended_when_a_checkpoint_is_saved_is_not_begun_again(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(5, **ALONGSIDE)
    run.stop_after = {3: "SIGTERM"}
    run.train = lambda: setattr(run, "evaluated", "commit 1" in run.journal)
    journal = journal_of_training(run)
    assert run.session is not None
    saved = run.session.checkpointer.saved[3]["evaluations"]  # type: ignore[attr-defined]
    recorded = [line.partition(" of ")[0] for line in journal if " at " in line]
    assert recorded == ["record before at 0", "record step_2 at 2 (written at 3)"] and saved == {}
    assert not [line for line in journal if line.startswith("evaluate after")]


def test_an_evaluation_that_runs_when_the_run_stops_is_not_awaited(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(5, **ALONGSIDE)
    run.stop_after = {3: "SIGTERM"}
    journal_of_training(run)
    assert run.session is not None
    assert run.session.checkpointer.saved[3]["evaluations"] == {"step_2": [2, 2]}  # type: ignore[attr-defined]


def test_without_sets_nothing_is_evaluated(make_run: Callable[..., FakeRun]) -> None:
    journal = journal_of_training(make_run(2, evaluation__sets=[], evaluation__every=1))
    assert not [line for line in journal if line.startswith("evaluate")]


def test_a_run_that_is_asked_to_stop_saves_and_neither_evaluates_nor_exports(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(5, run__export=True)
    run.stop_after = {2: "SIGTERM"}
    journal = journal_of_training(run)
    assert journal[-1] == "save 2 and wait"
    assert not [line for line in journal if "after" in line or "export" in line]
    assert run.session is not None and run.session.stopped == "SIGTERM"


def test_a_finished_run_exports_its_policy_last(make_run: Callable[..., FakeRun]) -> None:
    assert journal_of_training(make_run(1, run__export=True))[-1] == "export to hf"


def test_a_failed_update_keeps_its_batch_and_publishes_nothing(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(3)

    def fail() -> None:
        raise ArithmeticError("nan")

    run.train = fail
    session = run.build()
    with pytest.raises(ArithmeticError):
        train(session)
    assert run.journal[-2:] == ["train plan for version 0", "keep batch 0: nan"]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("partial", [True, False])
def test_the_weights_are_published_again_if_no_engine_is_left(
    make_run: Callable[..., FakeRun], mode: str, partial: bool
) -> None:
    """Responses that wait for an engine cannot end before there is one, so nothing is drained."""
    ahead = {} if mode == "sync" else {"sync_interval": 2, "max_staleness": 3}
    run = make_run(3, admission={"mode": mode, **ahead}, rollout__partial_rollout=partial, evaluation__sets=[])
    run.lost = {2: 1 if mode == "sync" else 2}  # the early preparation is repeated after the publication in turn
    journal = journal_of_training(run)
    from_there = journal[journal.index("admit 2") :]
    again = ["announce 2", "publish 2", "record sync of version 2", "set version 2"]
    assert [line for line in from_there if line in ("drain", *again)][:4] == again
    assert from_there.index("set version 2") < from_there.index("take batch 2 for version 2")
    assert [line for line in journal if line.startswith("commit")] == ["commit 0", "commit 1", "commit 2"]
    assert run.session is not None and "no engine serves; publishing version 2" in run.session.recorder.said[-1]  # type: ignore[attr-defined]


def test_an_evaluation_that_finds_no_engine_left_is_made_again_with_new_ones(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(1)
    run.lost_before = {"after": 1}
    journal = journal_of_training(run)
    end = journal[journal.index("poll the save") + 1 :]
    again = ["announce 1", "publish 1", "record sync of version 1", "set version 1"]
    evaluation = ["evaluate after of version 1", "record after at 1 of version 1: ['report of version 1']"]
    assert end == [*again, *evaluation]


@pytest.mark.parametrize("label", ["before", "after"])
def test_an_evaluation_that_loses_all_engines_again_and_again_ends_the_run(
    make_run: Callable[..., FakeRun], label: str
) -> None:
    """A prompt that ends its engine would otherwise be sent to new engines forever."""
    run = make_run(1)
    run.lost_before = {label: MOST_PUBLICATIONS}
    assert "record after at 1 of version 1: ['report of version 1']" in journal_of_training(run)
    again = make_run(1)
    again.lost_before = {label: MOST_PUBLICATIONS + 1}
    with pytest.raises(RolloutError, match=r"evaluation was started 4 times, .*reason: replica 0 has died"):
        journal_of_training(again)
    version = 0 if label == "before" else 1
    assert again.journal.count(f"publish {version}") == 1 + MOST_PUBLICATIONS


def test_an_evaluation_that_is_begun_again_is_bounded_too(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(4, evaluation__every=2)
    run.record = {**OLD_RECORD, "step": 2, "version": 2, "evaluations": {"step_2": [2, 2]}}
    run.lost_before = {"step_2": MOST_PUBLICATIONS + 1}
    with pytest.raises(RolloutError, match="replica 0 has died"):
        journal_of_training(run)
    assert run.journal.count("publish 2") == 1 + MOST_PUBLICATIONS


def test_a_batch_may_lose_all_engines_more_often_than_an_evaluation(make_run: Callable[..., FakeRun]) -> None:
    """Its groups go on from where they were, and a group that ends its engines fails by itself."""
    run = make_run(1, evaluation__sets=[])
    run.lost = {0: 2 * MOST_PUBLICATIONS}
    assert journal_of_training(run).count("publish 0") == 1 + 2 * MOST_PUBLICATIONS
    assert "commit 0" in run.journal


def test_an_evaluation_alongside_training_that_loses_all_engines_goes_on_with_new_ones(
    make_run: Callable[..., FakeRun],
) -> None:
    """It is not begun again, and like a batch it may lose them more often: its responses fail by themselves."""
    run = make_run(5, **ALONGSIDE)
    run.lost_alongside = {"step_2": 1, "step_4": 2 * MOST_PUBLICATIONS}
    journal = evaluations_and_publications(journal_of_training(run))
    assert journal.count("publish 4") == 2 and journal.count("publish 5") == 1 + 2 * MOST_PUBLICATIONS
    first = journal.index("publish 4")
    assert journal[first + 1] == "record step_2 at 2 (written at 4) of version 2: ['report of version 2']"
    assert [line for line in journal if line.startswith("start evaluation")] == [
        "start evaluation step_2 of version 2",
        "start evaluation step_4 of version 4",
    ]
    assert journal[-1].startswith("record after at 5")


@pytest.mark.parametrize("due", [{4}, set()])
def test_a_stop_during_the_last_evaluation_is_saved_and_resumes_into_it(
    make_run: Callable[..., FakeRun], due: set[int]
) -> None:
    """It is saved with `checkpoint.every: 0` too."""
    run = make_run(4)
    run.due, run.stop_in = due, "after"
    journal = journal_of_training(run)
    assert run.session is not None and run.session.stopped == "the time limit is near" and run.session.steps_done == 4
    assert "save 4 and wait" in journal and not [line for line in journal if line.startswith("record after")]
    assert run.session.evaluations.state_dict() == {}  # the loop makes it again by itself
    again = make_run(4)
    again.record = {**OLD_RECORD, "step": 4, "version": 4}
    journal = journal_of_training(again)
    assert [line for line in journal if "evaluate" in line] == ["evaluate after of version 4"]
    assert not [line for line in journal if line.startswith("take batch")]


def test_a_stop_during_an_evaluation_between_steps_is_obeyed_and_the_evaluation_made_again(
    make_run: Callable[..., FakeRun],
) -> None:
    run = make_run(4, evaluation__every=2)
    run.stop_in = "step_2"
    journal = journal_of_training(run)
    assert journal[-1] == "save 2 and wait"
    assert run.session is not None
    saved = run.session.checkpointer.saved[2]["evaluations"]  # type: ignore[attr-defined]
    assert saved == {"step_2": [2, 2]}
    again = make_run(4, evaluation__every=2)
    again.record = {**OLD_RECORD, "step": 2, "version": 2, "evaluations": saved}
    made = [line for line in journal_of_training(again) if line.startswith("evaluate")]
    assert made == ["evaluate step_2 of version 2", "evaluate after of version 4"]


@pytest.mark.parametrize("label", ["before", "step_2", "after"])
def test_a_stop_that_is_withdrawn_after_it_has_ended_an_evaluation_is_obeyed(
    make_run: Callable[..., FakeRun], label: str
) -> None:
    """The run would go on without the evaluation, which only the next start makes again."""
    run = make_run(4, evaluation__every=2)
    run.stop_in, run.withdraws = label, True
    journal = journal_of_training(run)
    assert run.session is not None and run.session.stopped == "a stop request that was withdrawn"
    assert run.session.steps_done == {"before": 0, "step_2": 2, "after": 4}[label]
    assert not [line for line in journal if line.startswith(f"record {label}")]


def test_a_stop_during_the_first_of_several_evaluations_that_are_made_again_loses_none(
    make_run: Callable[..., FakeRun],
) -> None:
    run = make_run(4, evaluation__every=2)
    begun = {"step_1": [1, 1], "step_2": [2, 2]}
    run.record = {**OLD_RECORD, "step": 2, "version": 2, "evaluations": begun}
    run.stop_in = "step_2"
    journal = journal_of_training(run)
    assert [line for line in journal if line.startswith("evaluate")] == ["evaluate step_2 of version 2"]
    assert run.session is not None and run.session.stopped == "the time limit is near"
    assert run.session.evaluations.state_dict() == begun


def test_a_reference_that_is_not_due_is_no_update(make_run: Callable[..., FakeRun]) -> None:
    """A trace shows each phase: one that does nothing would be a second update of the step."""
    run = make_run(3, evaluation__sets=[])
    run.reference_due = lambda steps_done: steps_done == 2
    journal_of_training(run)
    assert run.refreshed == [2]


def test_a_step_that_is_skipped_is_committed_and_the_run_goes_on(
    make_run: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(2, evaluation__sets=[])
    failures = [NonFiniteError("the loss is nan")]

    def train_once() -> None:
        if failures:
            raise failures.pop()

    run.train, run.reference_due = train_once, lambda steps_done: True
    monkeypatch.setattr(Session, "skip", lambda session, error, plan: f"skipped {plan}")
    journal = journal_of_training(run)
    assert "keep batch 0: the loss is nan" in journal
    assert run.refreshed == [1, 2], "the reference follows after each step, skipped or not"
    recorded = [line for line in journal if line.startswith("record step ")]
    assert recorded[0].startswith("record step 0 of skipped plan") and recorded[1].startswith("record step 1 of plan")
    assert [line for line in journal if line.startswith("commit")] == ["commit 0", "commit 1"]


def test_an_alarm_has_the_weights_published_at_once(
    make_run: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps before it is due; the alarm is judged with the version that the step has made."""
    run = make_run(3, evaluation__sets=[], admission={"mode": "async", "sync_interval": 3, "max_staleness": 4})
    seen: list[int] = []
    monkeypatch.setattr(RunMonitor, "act", lambda monitor, version: seen.append(version) or version == 1)
    journal = journal_of_training(run)
    assert seen == [1, 2, 3]
    assert [line for line in journal if line.startswith("publish")] == ["publish 0", "publish 1", "publish 3"]
    assert journal.index("commit 0") < journal.index("publish 1") < journal.index("commit 1")


@pytest.mark.parametrize("saved", [False, True])
def test_an_alarm_that_stops_the_run_saves_the_step_before_unless_it_is_saved(
    make_run: Callable[..., FakeRun], saved: bool
) -> None:
    run = make_run(3, evaluation__sets=[])
    run.due = {1} if saved else set()

    def train_once() -> None:
        if "commit 0" in run.journal:
            raise AlarmStopsRun("alarm ess: 0.1 is below 0.5")

    run.train = train_once
    with pytest.raises(AlarmStopsRun, match="alarm ess"):
        journal_of_training(run)
    saves = [line for line in run.journal if line.startswith("save")]
    assert saves == (["save 1"] if saved else ["save 1 and wait"])
    assert "keep batch 1: alarm ess: 0.1 is below 0.5" in run.journal and "commit 1" not in run.journal


def test_an_alarm_that_stops_the_run_in_its_first_step_has_nothing_to_save(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(3, evaluation__sets=[])

    def train_once() -> None:
        raise AlarmStopsRun("alarm ess: 0.1 is below 0.5")

    run.train = train_once
    with pytest.raises(AlarmStopsRun, match="alarm ess"):
        journal_of_training(run)
    assert not [line for line in run.journal if line.startswith("save")]
