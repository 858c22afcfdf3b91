"""The trial call of reward functions before a run: as the run calls them, in a process that is killed if it hangs."""

import pytest

from megarl.rewards.types import RewardInput, RewardSpec
from megarl.run.start.checks import TrialCall, TrialProblem, TrialScore, trials

FUNCTIONS = """
import os, time
LIMIT = int(os.environ.get("NOT_SET", 3))

def sound(response, answer):
    return float(response == answer)

def of_a_dict(response, answer):
    return {"score": 1.0}

def looks_up(response, answer):
    table = {}
    return table[answer]

def endless(response, answer):
    time.sleep(600)

def ends(response, answer):
    os._exit(7)

def of_three(one, two, three):
    return 1.0
"""
SAMPLE = RewardInput("1+2=?", "3", [5], "stop", "3", {"problem": "1+2=?", "answer": "3"})


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[TrialProblem]]:
    """The problems that a trial finds in each function; all of them are tried at the same time, as a run's are."""
    directory = tmp_path_factory.mktemp("trial")
    (directory / "judges.py").write_text(FUNCTIONS)
    (directory / "typo.py").write_text("import os\n\nLIMIT = ten\n")
    names = ["judges:sound", "judges:of_a_dict", "judges:looks_up", "judges:endless", "judges:ends", "judges:of_three"]
    names += ["judges:absent", "typo:sound"]
    specs = [RewardSpec(name, key=f"data.sets.{index}.reward") for index, name in enumerate(names)]
    calls = [TrialCall(each, SAMPLE, "the first row") for each in specs]
    calls.append(TrialCall(RewardSpec("judges:endless"), None))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        with trials(calls, timeout_s=2.0, start_timeout_s=120.0, memory_bytes=None) as trial:
            found = list(trial)
    [scored] = [each for each in found if isinstance(each, TrialScore)]
    assert (scored.function, scored.result.score) == ("judges:sound", 1.0)
    keys = {f"data.sets.{index}.reward.function": name for index, name in enumerate(names)}
    message: dict[str, list[TrialProblem]] = {name: [] for name in (*names, "reward.function")}
    for each in (each for each in found if isinstance(each, TrialProblem)):
        message[keys.get(key := each.text.partition(":")[0], key)].append(each)
    return message


def test_a_sound_function_and_one_that_is_not_called_have_no_problem(
    problems: dict[str, list[TrialProblem]],
) -> None:
    assert problems["judges:sound"] == problems["reward.function"] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("judges:of_a_dict", "ValueError: a reward must be a number or a RewardResult, not {'score': 1.0}"),
        ("judges:looks_up", "KeyError: '3' (judges.py:13)"),
        ("judges:endless", "no reward after 2 s (reward.timeout_s)"),
        ("judges:ends", "the process ended: exit code 7"),
    ],
)
def test_a_call_that_fails_is_reported_with_its_cause(
    problems: dict[str, list[TrialProblem]], name: str, message: str
) -> None:
    [problem] = problems[name]
    assert problem.called and f"a trial call of {name!r} failed, with the first row: {message}" in problem.text


def test_of_a_traceback_the_users_lines_are_shown(problems: dict[str, list[TrialProblem]]) -> None:
    [problem] = problems["judges:looks_up"]
    assert 'judges.py", line 13, in looks_up\n' in problem.text and "return table[answer]" in problem.text
    assert "resolve.py" not in problem.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("judges:of_three", "needs (one, two, three)"),
        ("judges:absent", "module 'judges' has no attribute 'absent'"),
        ("typo:sound", "NameError: name 'ten' is not defined ("),
    ],
)
def test_a_function_that_cannot_be_called_is_told_apart(
    problems: dict[str, list[TrialProblem]], name: str, message: str
) -> None:
    [problem] = problems[name]
    assert not problem.called and message in problem.text
    assert "typo.py:3)" in problem.text or not name.startswith("typo")
