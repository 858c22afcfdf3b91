"""Two-digit additions, split into disjoint warm-start, training and held-out sets, and their worked solutions.

The split is by unordered pair {a, b}: 47 + 35 and 35 + 47 are always in the same set.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

CARRY_SHARE = 0.75  # share of problems with a carry in each set; a uniform draw would give 0.45
SOLUTIONS_PER_PROBLEM = 4
CAREFUL_SOLUTIONS = 1  # of a warm-start problem's four solutions, how many remember the carry


@dataclass(frozen=True)
class Addition:
    """The problem `a + b`, both in 10..99."""

    a: int
    b: int

    @property
    def problem(self) -> str:
        """The question in the prompt."""
        return f"What is {self.a} + {self.b}?"

    @property
    def answer(self) -> str:
        """The sum in digits."""
        return str(self.a + self.b)

    @property
    def has_carry(self) -> bool:
        """True if the sum of the ones is 10 or more."""
        return self.a % 10 + self.b % 10 >= 10

    @property
    def pair(self) -> tuple[int, int]:
        """The two numbers in ascending order; no pair may occur in two sets."""
        return (min(self.a, self.b), max(self.a, self.b))

    def solution(self, *, careful: bool) -> str:
        """Return the solution by column addition; if not careful, it forgets any carry."""
        ones = self.a % 10 + self.b % 10
        carry = self.has_carry and careful
        tens = self.a // 10 + self.b // 10 + carry
        steps = f"ones {self.a % 10}+{self.b % 10}={ones}, tens {self.a // 10}+{self.b // 10}"
        return f"{steps}{'+1' if carry else ''}={tens}, \\boxed{{{tens * 10 + ones % 10}}}"


@dataclass(frozen=True)
class Splits:
    """Disjoint problem sets, in seeded order."""

    warm_start: list[Addition]
    train: list[Addition]
    heldout: list[Addition]


def make_splits(seed: int, *, heldout: int = 600, train: int = 1000) -> Splits:
    """Split all pairs of two-digit numbers into three sets; `heldout` and `train` are numbers of problems.

    The held-out set has one order of each pair, the other sets have both. In each set, CARRY_SHARE of the problems have
    a carry; the warm-start set has all remaining pairs with a carry. Raises ValueError if there are too few pairs.
    """
    rng = random.Random(f"megarl-quickstart-problems-{seed}")
    pairs = [Addition(a, b) for a in range(10, 100) for b in range(a, 100)]
    pools = {flag: [pair for pair in pairs if pair.has_carry is flag] for flag in (True, False)}
    for pool in pools.values():
        rng.shuffle(pool)

    def take(count: int, flag: bool) -> list[Addition]:
        if count > len(pools[flag]):
            raise ValueError(f"only {len(pools[flag])} pairs are left of {count} needed: lower `heldout` or `train`")
        taken, pools[flag] = pools[flag][:count], pools[flag][count:]
        return taken

    held: list[Addition] = []
    trained: list[Addition] = []
    for flag, share in ((True, CARRY_SHARE), (False, 1 - CARRY_SHARE)):
        held += [rng.choice((pair, _swapped(pair))) for pair in take(round(heldout * share), flag)]
        trained += _both_orders(take(round(train * share / 2), flag))
    with_carry = len(pools[True])
    without = round(with_carry * (1 - CARRY_SHARE) / CARRY_SHARE)
    warm = _both_orders(take(with_carry, True) + take(without, False))
    for problems in (held, trained, warm):
        rng.shuffle(problems)
    splits = Splits(warm_start=warm, train=trained, heldout=held)
    check_disjoint(splits)
    return splits


def check_disjoint(splits: Splits) -> None:
    """Raise AssertionError if a pair, in either order, is in two sets or twice in the held-out set."""
    sets = {name: {item.pair for item in getattr(splits, name)} for name in ("warm_start", "train", "heldout")}
    for first, second in (("warm_start", "train"), ("warm_start", "heldout"), ("train", "heldout")):
        shared = sets[first] & sets[second]
        if shared:
            raise AssertionError(f"{first} and {second} share {len(shared)} problems, e.g. {sorted(shared)[0]}")
    if len(sets["heldout"]) != len(splits.heldout):
        raise AssertionError("a held-out problem occurs twice")


def solutions(problem: Addition) -> list[str]:
    """Return a warm-start problem's four solutions; only one remembers a carry."""
    return [problem.solution(careful=index < CAREFUL_SOLUTIONS) for index in range(SOLUTIONS_PER_PROBLEM)]


def _swapped(problem: Addition) -> Addition:
    return Addition(problem.b, problem.a)


def _both_orders(pairs: list[Addition]) -> list[Addition]:
    return [order for pair in pairs for order in dict.fromkeys((pair, _swapped(pair)))]
