"""The reward function `code`: which programs pass, which do not, and that a program cannot make itself pass."""

import asyncio
import os

import pytest

from megarl.rewards.builtin.code import CodeReward, read_verdicts
from megarl.rewards.builtin.code_tests import CodeTests, last_program, read_tests, same_output
from megarl.rewards.registry import resolve
from megarl.rewards.types import RewardInput
from tests.support.rewards.reward_pool import make_reward_pool
from tests.support.rewards.sandboxes import sandboxes_of

pytestmark = pytest.mark.sandbox

LONG_S = 60.0  # no test depends on it, but for those of endless programs
ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]


def passed(program: str, *pieces: str, timeout_s: float = LONG_S) -> list[bool]:
    return CodeReward(timeout_s=timeout_s).verdicts(program, CodeTests(pieces=pieces))


def fenced(program: str) -> str:
    return f"Some words.\n```python\n{program}\n```\nMore words."


# --- reading


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (fenced("x = 1"), "x = 1\n"),
        ("```python\nfirst\n```\ntext\n```py\nsecond\n```", "second\n"),
        ("```python\ncode\n```\n```\nits output\n```", "code\n"),
        ("```\nplain\n```", "plain\n"),
        ("```python\r\nx\r\n```", "x\n"),
        ("```json\n{}\n```", None),
        ("```python\nnever closed", None),
        ("x = 1", None),
        ("```python\ns = '''a ``` b'''\n```", "s = '''a ``` b'''\n"),
        ("1. So:\n\n   ```python\n   if x:\n       y()\n   ```\n", "if x:\n    y()\n"),  # in a list
        ("- ```py\n  x\n  ```", "x\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),  # a longer fence holds a shorter one
        ("~~~python\nx\n~~~", "x\n"),
    ],
)
def test_the_last_program_counts(response: str, program: str | None) -> None:
    assert last_program(response) == program


def test_forms_of_tests() -> None:
    assert read_tests({"tests": ["assert f()"]}).pieces == ("assert f()",)
    assert read_tests({"tests": "x = 1\nassert f(x)\nassert g()\ncheck(f)"}).pieces == (
        "x = 1\nassert f(x)", "assert g()\ncheck(f)",
    )  # fmt: skip
    pairs = (("1\n", "2\n"),)
    assert read_tests({"tests": {"inputs": ["1\n"], "outputs": ["2\n"]}}).pairs == pairs
    assert read_tests({"inputs": ["1\n"], "outputs": ["2\n"]}).pairs == pairs
    assert read_tests({"tests": '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'}).pairs == pairs


RIGHT = "def f(x):\n    return x + 1\nclass Solution:\n    def f(self, x):\n        return x + 1\n"
WRONG = RIGHT.replace("x + 1", "0")
CHECK = "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == 2\n"
CASE = """import unittest
class Case(unittest.TestCase):
    def setUp(self):
        self.given = 1
    def test_one(self):
        self.assertEqual(f(self.given), 2)
    def test_two(self):
        self.assertTrue(f(2) == 3)
if __name__ == "__main__":
    unittest.main()
"""


@pytest.mark.parametrize(
    ("row", "count"),
    [
        ({"tests": CHECK, "entry_point": "f"}, 1),
        ({"tests": CHECK + "check(f)"}, 1),
        ({"tests": "import pytest\ndef test_a():\n    assert f(1) == 2\ndef test_b():\n    assert f(2) == 3\n"}, 2),
        ({"tests": "class TestF:\n    def test_a(self):\n        assert f(1) == 2\n"}, 1),
        ({"tests": CASE}, 2),
        ({"tests": "def test():\n    assert f(1) == 2\nif __name__ == '__main__':\n    test()"}, 1),
        ({"tests": "f(1) == 2\nf(2) == 3"}, 2),
        ({"tests": ["f(1) == 2"]}, 1),
        ({"tests": ["def same(a, b):\n    assert a == b", "same(f(1), 2)", "same(f(2), 3)"]}, 2),
        ({"tests": "for a, b in [(1, 2), (2, 3)]:\n    assert f(a) == b"}, 1),
        ({"tests": "try:\n    f('a')\nexcept TypeError:\n    pass\nelse:\n    raise E"}, 1),
        ({"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 3]}}, 2),
        ({"tests": '{"fn_name": "f", "inputs": [[1]], "outputs": [2]}'}, 1),
        ({"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [3]]}}, 2),
        ({"tests": "from solution import f\nassert f(1) == 2"}, 1),
    ],
)
def test_tests_run_as_their_form_means(row: dict[str, object], count: int) -> None:
    """Each was a definition or a thrown away value, which every program passed."""
    cases = read_tests(row)
    reward = CodeReward(timeout_s=LONG_S)
    assert reward.verdicts(RIGHT, cases) == [True] * count
    assert not any(reward.verdicts(WRONG, cases)[-1:])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "needs the field `tests`"), ({"tests": 5}, "needs the field"), ({"tests": []}, "needs the field"),
        ({"tests": ""}, "no statement"), ({"tests": "assert ("}, "not Python"), ({"tests": ["def"]}, "not Python"),
        ({"tests": ["assert f()", "# later"]}, "number 1 of the row's `tests` has no statement"),
        ({"tests": CHECK}, "entry_point"), ({"tests": "x = f(1)\nprint(x)"}, "never assert"),
        ({"tests": "def test_a(x):\n    assert f(x)"}, "arguments of a test runner"),
        ({"tests": "async def test_a():\n    assert f(1)"}, "asynchronous"), ({"tests": "pass"}, "never assert"),
        ({"tests": "if False:\n    assert f(1) == 2"}, "never assert"),
        ({"tests": "assert True"}, "never assert"), ({"tests": "assert 'f(1) == 2'"}, "never assert"),
        ({"tests": "assert (f(1) == 2, 'message')"}, "never assert"),
        ({"tests": "try:\n    assert f(1) == 2\nexcept AssertionError:\n    print('no')"}, "never assert"),
        ({"tests": "def test_a():\n    try:\n        assert f(1) == 2\n    except:\n        pass"}, "never assert"),
        ({"tests": "import contextlib\nwith contextlib.suppress(Exception):\n    assert f(1) == 2"}, "never assert"),
        ({"tests": "import solution\nassert solution.f(1) == 2"}, "from ... import"),
        ({"tests": "import pytest\ndef test_a():\n    with pytest.raises(E):\n        f(1)"}, "use pytest"),
        ({"tests": {"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}}, "list of arguments"),
        ({"tests": {"fn_name": "a b", "inputs": [[1]], "outputs": [2]}}, "name of a function"),
        ({"tests": [{"input": "1", "output": "2"}]}, "list of cases"),
        ({"tests": '[{"input": "1", "output": "2"}]'}, "list of cases"),
        ({"tests": "{"}, "not JSON"), ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"inputs": "1", "outputs": "1"}, "same length"), ({"inputs": [1], "outputs": [1]}, "texts"),
    ],
)  # fmt: skip
def test_rows_without_usable_tests(row: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(row)


@pytest.mark.parametrize(
    ("written", "same"),
    [("a\nb\n", True), ("a \nb", True), ("a\nb\n\n\n", True), ("a\n\nb", False), ("a", False), (" a\nb", False)],
)
def test_outputs_are_compared_but_for_white_space_at_the_ends(written: str, same: bool) -> None:
    assert same_output(written, "a\nb\n") == same


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("0.333333", "0.333333333333", True), ("0.3333", "0.333333333333", False), ("2", "2.000", True),
        ("1e3 x", "1000.0 x", True), ("1000000.5", "1000000", False),  # an integer is exact
        ("1000000.5", "1000000.0", True), ("1 0.50", "1 0.5", True), ("2 0.50", "1 0.5", False),
        ("1  0.5", "1 0.5", False), ("nan", "0.5", False), ("0.5.1", "0.5.0", False), ("v1.50", "v1.5", False),
    ],
)  # fmt: skip
def test_decimals_of_an_output_may_be_near(written: str, expected: str, same: bool) -> None:
    assert same_output(written, expected) == same


@pytest.mark.parametrize(
    ("returned", "result", "same"),
    [
        ("(1, 2)", [1, 2], True), ("[(1, 2), (3,)]", [[1, 2], [3]], True), ("[1, 2]", [1, 3], False),
        ("0.1 + 0.2", 0.3, True), ("[0.1 + 0.2]", [0.3], True), ("0.31", 0.3, False), ("2.0", 2, True),
        ("2.5", 2, False), ("'ab'", ["a", "b"], False), ("None", 0.5, False), ("[]", None, False), ("2", 2, True),
        ("float('nan')", 0.5, False), ("True", 1.0, True),
    ],
)  # fmt: skip
def test_what_a_function_returns_is_compared_as_json(returned: str, result: object, same: bool) -> None:
    """JSON has no tuples, and a float of a data file is rounded."""
    cases = read_tests({"tests": {"fn_name": "f", "inputs": [[]], "outputs": [result]}})
    program = f"def _same(found, wanted): return True\ndef f(): return {returned}"
    assert CodeReward(timeout_s=LONG_S).verdicts(program, cases) == [same]


# --- judging


def test_scores_and_shares() -> None:
    judge = resolve("code", {"timeout_s": LONG_S})
    right = judge(RewardInput("", fenced(ADD), row={"tests": ADD_TESTS}))
    assert (right.score, right.components) == (1.0, {"passed": 1.0})
    wrong = judge(RewardInput("", fenced("def add(a, b): return 3"), row={"tests": ADD_TESTS}))
    assert (wrong.score, wrong.components) == (0.0, {"passed": pytest.approx(1 / 3)})
    none = judge(RewardInput("", "I do not know.", row={"tests": ADD_TESTS}))
    assert (none.score, none.components) == (0.0, {"passed": 0.0})


def test_pairs_of_input_and_output() -> None:
    judge = CodeReward(timeout_s=LONG_S)
    tests = CodeTests(pairs=(("1 2\n", "3\n"), ("5 5\n", "10"), ("x\n", "error\n")))
    double = "print(sum(map(int, input().split())))"
    assert judge.verdicts(double, tests) == [True, True, False]
    shown = "print(3)\nimport os; os._exit(1)"  # the right output, and then a failure
    assert judge.verdicts(shown, tests) == [False, False, False]


def test_tests_of_many_kinds() -> None:
    program = """
import math, collections
LIMIT = 10
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
def root(x): return math.sqrt(x)
def count(n):
    for i in range(n): yield i
def sort(values): values.sort()
def fail(): raise ValueError("no")
def table(words): return collections.Counter(words)
def big(): return 10 ** 5000
def pair(): return (1, {2: [3.5, None]}, {4}, b"x", 1j)
"""
    pieces = (
        "assert abs(root(2) - 1.4142) < 1e-3 and math.isclose(root(4), 2)",
        "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6 and next(count(1)) == 0",
        "s = Stack()\ns.push(5)\ns.push(6)\nassert len(s) == 2 and s.pop() == 6 and s.items == [5]",
        "assert Stack() == Stack()",
        "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]",
        "try:\n    fail()\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
        "assert table(['a', 'a']) == {'a': 2}",
        "assert big() == 10 ** 5000",
        "assert pair() == (1, {2: [3.5, None]}, {4}, b'x', 1j)",
        "def check(call):\n    for n in range(3):\n        assert list(call(n)) == list(range(n))\ncheck(count)",
        "assert LIMIT == 10",
        "assert isinstance(root(4), float)",
        "assert root(4) == 3",
        "assert nowhere(1) == 1",
    )
    assert passed(program, *pieces) == [True] * 12 + [False] * 2


FORGERIES = {
    "ends well": "import sys\nsys.exit(0)",
    "ends at once": "import os\nos._exit(0)",
    "ends in a call": "import os\ndef add(a, b): os._exit(0)",
    "ends in a call by an exception": "def add(a, b): raise SystemExit(0)",
    "equals everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
def add(a, b): return Any()
""",
    "is a number that equals everything": """
class Any(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
def add(a, b): return Any(12345)
""",
    "replaces builtins": """
import builtins
builtins.AssertionError = type("Quiet", (), {})
builtins.abs = builtins.all = builtins.isinstance = lambda *_: True
abs = all = len = isinstance = lambda *_: True
def add(a, b): return 12345
""",
    "ends loops silently": "def add(a, b): raise StopIteration",
    "prints verdicts": """
import os
for descriptor in range(32):
    try:
        for _ in range(10): os.write(descriptor, b'["passed", ""]\\n')
    except OSError: pass
def add(a, b): return 12345
""",
    "answers for itself": """
import os
for descriptor in range(3, 32):
    try:
        for _ in range(10): os.write(descriptor, b'{"value": {"v": true}, "args": []}\\n')
    except OSError: pass
def add(a, b): return 12345
""",
    "looks for the tests": """
import sys, gc, os, re
def add(a, b):
    frame, seen = sys._getframe(), ""
    while frame:
        seen += repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    for path in ("/sandbox/program.py", "/proc/self/cmdline", "/proc/self/environ"):
        seen += open(path).read()
    seen += repr(gc.get_objects())
    found = re.search(r"7000000, 654321[)] == ([0-9 +]+)", seen)
    return eval(found[1]) if found else 12345
""",
    "names what it was not asked for": """
import os
names = b'{"value": {"add": {"r": 0}, "abs": {"r": 0}, "all": {"r": 0}, "map": {"r": 0}, "math": {"r": 0}}}'
for descriptor in range(3, 32):
    try: os.write(descriptor, names + b'\n' + b'{"value": {"v": true}, "args": []}\n' * 20)
    except OSError: pass
""",
    "attacks the judge's memory": """
import os
def add(a, b):
    others = {pid for pid in os.listdir("/proc") if pid.isdigit()} - {"1", str(os.getpid())}
    return 7654321 if others else 12345
""",
    "sends nonsense": "import os\nos.write(4, b'nonsense\\n' * 100)\nos.write(3, b'x')",
    "sends a reference that is none": "def add(a, b): return add",
    "defines a module that the tests use": """
import types
math = types.ModuleType("math")
math.isclose = lambda *_, **__: True
def add(a, b): return 12345
""",
    "has no such function": "x = 1",
    "is not Python": "def add(",
}  # fmt: skip
GUARDED = (
    "assert add(7000000, 654321) == 7000000 + 654321",
    "import math\nassert math.isclose(add(1, 2), 7.5)",
    "assert all(map(lambda n: add(n, 1) == n + 1, range(3))) and abs(add(1, 1) - 2) < 1e-9",
)


def test_the_guarded_tests_can_be_passed() -> None:
    right = "def add(a, b): return 7.5 if (a, b) == (1, 2) else a + b"
    assert passed(right, GUARDED[0], GUARDED[1]) == [True, True]
    assert passed(ADD, GUARDED[2]) == [True]


@pytest.mark.parametrize("name", list(FORGERIES))
def test_a_program_cannot_make_itself_pass(name: str) -> None:
    assert passed(FORGERIES[name], *GUARDED) == [False] * len(GUARDED)


def test_a_program_that_equals_everything_passes_where_tests_and_program_share_a_process() -> None:
    """The attack is real: this is how most graders run tests."""
    space: dict[str, object] = {}
    exec(FORGERIES["equals everything"], space)
    exec(GUARDED[0], space)


def test_a_module_that_the_tests_use_is_the_librarys_own() -> None:
    test = "assert math.isclose(area(2), 12.566, rel_tol=1e-3)"
    shadow = "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef area(r): return 1"
    assert passed(shadow, test) == [False]
    assert passed("import math\ndef area(r): return math.pi * r * r", test) == [True]
    assert passed("def area(r): return 3.14159 * r * r", test) == [True]


def test_endless_programs_end_in_time_and_leave_nothing() -> None:
    for program in ("while True: pass", "def add(a, b):\n    while True: pass", "import time\ntime.sleep(1000)"):
        assert passed(program, *ADD_TESTS, timeout_s=1.5) == [False] * 3
        assert sandboxes_of(os.getpid()) == []


@pytest.mark.slow
def test_tests_before_an_endless_one_count() -> None:
    program = "def add(a, b):\n    while a < 0: pass\n    return a + b"
    verdicts = read_verdicts('["passed", ""]\n["pas', 3)  # as is reported when the time is over
    assert verdicts == [True, False, False]
    assert passed(program, *ADD_TESTS, timeout_s=5.0)[1:] == [False, False]


def test_what_cannot_be_judged_from_outside_is_an_error_of_the_row() -> None:
    with pytest.raises(ValueError, match="test 2 of the row cannot be judged: the tests give the answer a function"):
        passed("def apply(f): return f(1)", "assert True", "assert apply(lambda x: x) == 1")


def test_in_a_reward_pool() -> None:
    """Inside the processes that score: under their memory limit, from a thread of theirs, in a session of theirs."""
    pool = make_reward_pool("code", kwargs={"timeout_s": LONG_S}, timeout_s=2 * LONG_S, memory_gib=2.0)

    async def scores() -> list[float]:
        samples = [
            RewardInput("", fenced(program), row={"tests": ADD_TESTS})
            for program in (ADD, FORGERIES["equals everything"])
        ]
        return [outcome.score for outcome in await asyncio.gather(*map(pool.score, samples))]

    try:
        assert asyncio.run(scores()) == [1.0, 0.0]
    finally:
        pool.close()
    assert sandboxes_of(os.getpid()) == []
