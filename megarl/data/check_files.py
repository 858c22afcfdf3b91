"""Checks a run's data files before anything starts: every bad row, not only the first."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from megarl.chat.formats import Prompt
from megarl.common.errors import Findings
from megarl.config.derived.datasets import HeldOutSet, TrainSet
from megarl.data.dataset import RowMistake, has_more_rows, load_prompts, row_mistakes
from megarl.rewards.registry import row_check

MOST_ROWS = 50_000  # per file, about a second; the run checks all of them
MOST_SHOWN = 10  # rows with the same mistake

DataSet = TrainSet | HeldOutSet
ReportMistake = Callable[[RowMistake], object]  # reports one mistake


def data_file_findings(
    sets: Iterable[DataSet], report: ReportMistake | None = None, *, only_present: bool = False
) -> Findings:
    """Find each kind of mistake in the rows of training and evaluation sets, with the first rows that have it.

    With `report` whole files are read, and every mistake is reported when found. Otherwise only the first rows are
    checked, and a note names each file with more. `only_present`: skip files that are not on this machine.
    """
    found = Findings()
    for each in sets:
        if only_present and not each.path.exists():
            continue
        try:
            unscored = isinstance(each, TrainSet) and each.demonstrates
            check = None if unscored or each.reward.expects_failures else row_check(each.reward.function)
            mistakes = row_mistakes(each.path, each.data, None if report else MOST_ROWS, check)
            kinds = _by_kind(mistakes if report is None else _reported(mistakes, report))
            cut = report is None and most_rows(each) == MOST_ROWS and has_more_rows(each.path, MOST_ROWS)
        except (ValueError, OSError) as error:
            found.add(Findings([f"{each.key}: {error}"]))
            continue
        found.add(Findings([f"{each.key}: {_text(kind, every_row_reported=report is not None)}" for kind in kinds]))
        if cut:
            note = f"{each.path}: the first {MOST_ROWS:,} rows were checked; megarl plan --all-mistakes reads all"
            found.add(Findings(notes=[note]))
    return found


def most_rows(chosen: DataSet, *, whole: bool = False) -> int | None:
    """Return how many rows of a set are checked at most; None: all that the run uses. `whole`: check them all."""
    used = chosen.limit if isinstance(chosen, HeldOutSet) else None
    if whole:
        return used
    return MOST_ROWS if used is None else min(used, MOST_ROWS)


@dataclass
class _Kind:
    """The rows with one kind of mistake: how many there are, and the first of them."""

    count: int = 0
    first: list[RowMistake] = field(default_factory=list)


def _reported(found: Iterable[RowMistake], report: ReportMistake) -> Iterator[RowMistake]:
    for mistake in found:
        report(mistake)
        yield mistake


def _by_kind(found: Iterable[RowMistake]) -> list[_Kind]:
    """Return the kinds in the order of their first rows, in bounded memory."""
    kinds: dict[str, _Kind] = {}
    for mistake in found:
        kind = kinds.setdefault(mistake.kind, _Kind())
        kind.count += 1
        if kind.count <= MOST_SHOWN:
            kind.first.append(mistake)
    return list(kinds.values())


def _text(kind: _Kind, *, every_row_reported: bool) -> str:
    """Return one line for one row; otherwise the kind, the number of rows, and a line per shown row."""
    if kind.count == 1:
        return str(kind.first[0])
    seen = {each.seen for each in kind.first}
    same = len(seen) == 1  # then it is said once
    lines = [f"{kind.count} rows: {kind.first[0].kind}{seen.pop() if same else ''}"]
    lines += [f"{each.where}{'' if same else each.seen}" for each in kind.first]
    if left := kind.count - len(kind.first):
        lines.append(f"and {left} more" + ("" if every_row_reported else " (megarl plan --all-mistakes prints each)"))
    return "\n      ".join(lines)


def first_prompts(sets: Iterable[DataSet]) -> dict[str, Prompt]:
    """Return the first prompt of each set by the set's key, without sets whose first row is wrong."""
    found = {}
    for each in sets:
        try:
            found[each.key] = load_prompts(each.path, each.data, 1)[0]
        except (ValueError, OSError):  # reported by `data_file_findings`
            continue
    return found
