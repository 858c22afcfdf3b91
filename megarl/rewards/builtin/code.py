"""The reward function `code`: runs the unit tests of the row against the program in a response, in the sandbox."""

import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from megarl.rewards.builtin.code_programs import answer_program, judge_program
from megarl.rewards.builtin.code_tests import CodeTests, last_program, read_tests, same_output
from megarl.rewards.types import RewardResult
from megarl.sandbox.availability import require_sandbox
from megarl.sandbox.limits import Limits, SandboxError
from megarl.sandbox.packages import find_packages
from megarl.sandbox.runner import Sandbox

LEAST_S = 0.05  # a test with less time left fails


class CodeReward:
    """Score 1 if all tests pass, else 0; the component `passed` is the share that passes.

    `timeout_s`: for all tests of a response together; must be less than `reward.timeout_s`. `memory_mib`: of a program;
    `packages`: what it can import (`find_packages`). Raises ValueError for invalid values.
    """

    def __init__(self, timeout_s: float = 6.0, memory_mib: int = 512, packages: Sequence[str] = ()) -> None:
        self.timeout_s, self.packages = timeout_s, tuple(packages)
        find_packages(packages)
        self.limits = Limits(
            timeout_s=timeout_s, cpu_s=max(1, round(timeout_s)), memory_mib=memory_mib, output_kib=4096
        )

    def warm_up(self) -> None:
        """Raise SandboxError if this machine has no sandbox."""
        require_sandbox()

    def __call__(self, response: str, row: dict[str, Any]) -> RewardResult:
        """Judge a response. Raises ValueError for a row without usable tests."""
        cases = read_tests(row)
        program = last_program(response)
        if program is None:
            return RewardResult(0.0, {"passed": 0.0})
        verdicts = self.verdicts(program, cases)
        passed = sum(verdicts)
        return RewardResult(float(passed == len(verdicts)), {"passed": passed / len(verdicts)})

    def verdicts(self, program: str, cases: CodeTests) -> list[bool]:
        """Return which of the tests (at least one) have passed."""
        deadline = time.monotonic() + self.timeout_s
        sandbox = Sandbox(self.limits, slots=1, packages=self.packages)
        try:
            if cases.pairs:
                return [self._of_pair(sandbox, program, pair, deadline) for pair in cases.pairs]
            return self._of_pieces(sandbox, program, cases.pieces, deadline)
        finally:
            sandbox.close()

    @staticmethod
    def _of_pair(sandbox: Sandbox, program: str, pair: tuple[str, str], deadline: float) -> bool:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            return False
        result = sandbox.run_now(program, stdin=pair[0], timeout_s=left)
        return result.ok and same_output(result.stdout, pair[1])

    @staticmethod
    def _of_pieces(sandbox: Sandbox, program: str, pieces: tuple[str, ...], deadline: float) -> list[bool]:
        """Run the tests alongside the program; tests that were not reached have failed."""
        to_program, from_judge = os.pipe2(os.O_CLOEXEC)
        to_judge, from_program = os.pipe2(os.O_CLOEXEC)
        problems: list[Exception] = []
        judged = threading.Event()

        def run_program() -> None:
            left = max(LEAST_S, deadline - time.monotonic())
            try:
                sandbox.run_now(answer_program(program), stdin=to_program, stdout=from_program, timeout_s=left)
            except (OSError, SandboxError) as error:
                if not judged.is_set():  # else it was cancelled, because it is no longer needed
                    problems.append(error)

        running = threading.Thread(target=run_program)
        running.start()
        try:
            left = max(LEAST_S, deadline - time.monotonic())
            reported = sandbox.run_now(judge_program(pieces), stdin=to_judge, stdout=from_judge, timeout_s=left)
        finally:
            judged.set()
            sandbox.close()
            running.join()
        if problems:
            raise problems[0]
        return read_verdicts(reported.stderr, len(pieces))


def check_row(answer: str, row: dict[str, Any]) -> None:
    """Raise ValueError for a row without usable tests."""
    read_tests(row)


def read_verdicts(reported: str, count: int) -> list[bool]:
    """Return which tests have passed by the judge's report; unreported ones have failed.

    Raises ValueError for a test that cannot be judged from outside the program.
    """
    verdicts: list[bool] = []
    for line in reported.splitlines():
        try:
            kind, message = json.loads(line)
        except ValueError:  # the judge was killed in the middle of a line
            break
        if kind == "unsupported":
            raise ValueError(f"test {len(verdicts) + 1} of the row cannot be judged: {message}")
        if kind == "ended":
            break
        verdicts.append(kind == "passed")
    return (verdicts + [False] * count)[:count]
