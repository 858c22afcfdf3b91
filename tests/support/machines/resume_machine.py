"""Random runs that are killed and resumed, with the journal between; checked on the tree of weights itself."""

import copy
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megarl.config.derived.staleness import Pace
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rollout.admission.admission import Admission
from megarl.rollout.engine.response_parts import ResponsePart, join_parts
from megarl.rollout.resume.group_progress import PartialResponse, UnfinishedGroup
from megarl.rollout.resume.journal_records import (
    EpochRecord,
    encode_group,
    encode_unfinished,
    newest_version,
    read_head,
    spans_of,
)
from megarl.rollout.resume.kept_groups import History, JournaledGroup, KeptGroups, Retention, SupersededRecords
from megarl.rollout.resume.lineage import INITIAL, Lineage, next_epoch
from tests.support.machines.admission_machine import paces


@dataclass
class Weights:
    """All weights of all attempts: a tree, whose edges are updates."""

    parents: list[int] = field(default_factory=lambda: [-1])
    versions: list[int] = field(default_factory=lambda: [0])

    def update(self, node: int) -> int:
        self.parents.append(node)
        self.versions.append(self.versions[node] + 1)
        return len(self.parents) - 1

    def path(self, node: int) -> list[int]:
        return [node, *self.path(self.parents[node])] if node >= 0 else []

    def lost(self, node: int, present: int) -> int:
        """The number of updates of `node` that `present` does not contain."""
        return len(set(self.path(node)) - set(self.path(present)))

    def distance(self, one: int, other: int) -> int:
        return self.lost(one, other) + self.lost(other, one)


@dataclass
class Saved:
    """A checkpoint."""

    node: int
    step: int
    admission: dict
    lineage: Lineage
    trained: list[int]


class ResumeMachine(RuleBasedStateMachine):
    """A token's id is the node of the weights that made it, so that the checks need no tags.

    The trainer may resume from any checkpoint that was ever complete, also from one that was set aside.
    """

    @initialize(groups=st.integers(1, 3), pace=paces(), max_uses=st.integers(1, 2))
    def start(self, groups: int, pace: Pace, max_uses: int = 1) -> None:
        self.pace, self.groups, self.max_uses = pace, groups, max_uses
        self.weights = Weights()
        self.disk: list[bytes] = []  # the journal
        self.everything: list[bytes] = []  # as if nothing were ever removed from it
        self.pending: list[bytes] = []
        self.written: dict[int, list[int]] = {}  # what the last record of each group has
        self.complete: list[Saved] = []
        self.begin(None)

    def begin(self, saved: Saved | None) -> None:
        self.admission = Admission(self.groups, self.pace, max_uses=self.max_uses)
        self.once: dict[int, set[int]] = {}  # the nodes of the groups that this attempt has trained once
        attempts = self.attempts if hasattr(self, "attempts") else 0
        if saved is not None:
            self.admission.load_state_dict(saved.admission, attempts)
        else:
            self.admission.load_state_dict(self.admission.state_dict(), attempts)
        self.node, self.step = (saved.node, saved.step) if saved else (0, 0)
        self.trained = list(saved.trained) if saved else []
        self.saving: list[Saved] = []
        self.tokens: dict[int, ResponsePart] = {}  # of groups in flight
        self.nodes: dict[int, set[int]] = {}  # of groups that have finished, until they are trained
        history = History.of(self.admission.state_dict())
        self.publish()
        resumed = saved.lineage if saved else INITIAL
        started = self.keep(resumed, history)
        if saved is None or saved is self.newest:
            self.nothing_useful_was_removed(resumed, history, started)
        version = self.weights.versions[self.node]
        self.lineage = next_epoch(resumed, version, KeptGroups(self.disk).lineage)
        record = EpochRecord(self.lineage, {}).encode()
        self.disk.append(record)
        self.everything.append(record)
        self.retention = Retention(self.pace, History(version, history.next_group, history.unsettled))
        self.pending, self.ended = [], {}

    @property
    def newest(self) -> Saved | None:
        return self.complete[-1] if self.complete else None

    def publish(self) -> None:
        self.published = self.node
        self.admission.set_version(self.weights.versions[self.node])

    def keep(self, resumed: Lineage, history: History) -> list[int]:
        """Use groups of the journal again, and check what they are said to be."""
        kept = KeptGroups(self.disk)
        kept.drop(lambda each: history.settled(each.group))
        kept.resume(resumed, self.weights.versions[self.node])
        started = self.admission.keep(kept.versions())
        for group in started:
            each = kept.groups[group]
            if each.finished:
                [row] = each.rows()
                assert row.group_id == group
                tokens = ResponsePart(row.response_ids, row.rollout_logprobs, row.versions)
                self.finish_with(group, row)
            else:
                tokens = self.tokens[group] = each.begun().responses[0, 0].tokens
            self.check_kept(each, tokens)
        return started

    def check_kept(self, group: JournaledGroup, tokens: ResponsePart) -> None:
        """The tokens are those that were written last, and no nearer to the history than they are said to be."""
        assert tokens.response_ids == self.written[group.group], "tokens are sampled again"
        assert tokens.logprobs == [-0.5 * node for node in tokens.response_ids]
        for span, recorded in zip(tokens.versions, spans_of(group.head)[0], strict=True):
            for node in tokens.response_ids[span.start : span.end]:
                assert span.version == self.weights.versions[node]
                lost = self.weights.lost(node, self.node)
                assert lost <= span.lost, "a lost update is not counted"
                assert lost == span.lost or recorded.lost, "another number of lost updates"

    def nothing_useful_was_removed(self, resumed: Lineage, history: History, started: list[int]) -> None:
        kept = KeptGroups(self.everything)
        kept.drop(lambda each: history.settled(each.group))
        kept.resume(resumed, self.weights.versions[self.node])
        fresh = Admission(self.groups, self.pace)
        if history.next_group:
            assert self.newest is not None
            fresh.load_state_dict(self.newest.admission)
        fresh.set_version(self.weights.versions[self.node])
        assert fresh.keep(kept.versions()) == started

    def finish_with(self, group: int, row: Trajectory) -> None:
        self.nodes[group] = set(row.response_ids)
        self.admission.finish(group, True, {span.counts_as for span in row.versions})

    @rule()
    def admit(self) -> None:
        new = self.admission.admit()
        assert not set(new) & (set(self.tokens) | set(self.nodes) | set(self.trained)), "a group is started twice"
        self.tokens |= {group: ResponsePart() for group in new}
        self.generate()

    @rule()
    def generate(self) -> None:
        """Every group in flight gets a token of the weights that are published."""
        span = (VersionSpan(self.weights.versions[self.published], 0, 1),)
        part = ResponsePart([self.published], [-0.5 * self.published], span)
        self.tokens = {group: join_parts(before, part) for group, before in self.tokens.items()}

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), journalled=st.booleans())
    def finish(self, data: st.DataObject, journalled: bool) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.tokens))))
        if journalled:
            self.write()

    def end(self, group: int) -> None:
        part = self.tokens.pop(group)
        row = Trajectory(group, 0, [1], part.response_ids, part.logprobs, part.versions, "stop", 1.0)
        self.pending.append(encode_group([row], "problem"))
        self.ended[group] = part.response_ids
        self.finish_with(group, row)

    @rule(count=st.integers(1, 4))
    def work(self, count: int) -> None:
        """Steps without trouble: whatever may start does, ends, and is written; then a step is trained."""
        for _ in range(count):
            self.admit()
            for group in sorted(self.tokens):
                self.end(group)
            self.write()
            self.train()

    @rule()
    def write(self) -> None:
        """Finished groups, and what unfinished ones have."""
        unfinished = [
            encode_unfinished(group, UnfinishedGroup({(0, 0): PartialResponse("prompt", part)}), "problem")
            for group, part in self.tokens.items()
        ]
        for record in (*unfinished, *self.pending):
            self.disk.append(record)
            self.everything.append(record)
        self.written |= {group: part.response_ids for group, part in self.tokens.items()} | self.ended
        self.pending, self.ended = [], {}

    @rule()
    def train(self) -> None:
        taken = self.admission.batch(self.step)
        if taken is None:
            return
        last = self.node
        for _ in range(self.pace.updates_per_step - 1):
            last = self.weights.update(last)
        for group in taken[0]:
            nodes = self.nodes.pop(group)
            assert group not in self.trained, "a group is trained twice in the history"
            far = max(self.weights.distance(node, last) for node in nodes)
            assert far <= self.pace.max_staleness, "the bound is passed"
            self.trained.append(group)
            self.once[group] = nodes
        reused = sorted(self.admission.taken(self.step).reused)
        for group in reused:
            assert group in self.once, "a group is used again that an attempt before has trained, or too often"
            far = max(self.weights.distance(node, last) for node in self.once.pop(group))
            assert far <= self.pace.max_staleness, "the bound is passed"
        self.node = self.weights.update(last)
        self.admission.commit(
            self.step, trained=len(taken[0]), filtered=0, dropped_stale=0, failed=0,
            reused=len(reused), trained_groups=taken[0],
        )  # fmt: skip
        self.step += 1
        if self.pace.publishes_after(self.step):
            self.publish()

    @rule()
    def save(self) -> None:
        """Begin to write a checkpoint; the one before it is written or given up."""
        state = copy.deepcopy(self.admission.state_dict())
        self.saving = [*self.saving[-1:], Saved(self.node, self.step, state, self.lineage, list(self.trained))]
        self.retention.saving(self.step, History.of(state))

    @precondition(lambda self: self.saving)
    @rule()
    def complete_save(self) -> None:
        saved = self.saving.pop(0)
        self.complete.append(saved)
        assert self.retention.saved(saved.step) or any(each.step == saved.step for each in self.complete[:-1])

    @rule()
    def tidy(self) -> None:
        now = History.of(self.admission.state_dict())
        heads, superseded = [read_head(record) for record in self.disk], SupersededRecords()
        for head in heads:
            superseded.count(head)
        self.disk = [
            record
            for record, head in zip(self.disk, heads, strict=True)
            if head["kind"] == "epoch"
            or (not superseded.later(head) and self.retention.keeps(head["group"], newest_version(head), now))
        ]

    @rule(data=st.data(), survives=st.booleans())
    def crash(self, data: st.DataObject, survives: bool) -> None:
        """`survives`: the controller lives on and writes what waits."""
        if survives:
            self.write()
        choices = [None] if not self.complete else [self.newest, self.newest, *self.complete]
        self.resume(data.draw(st.sampled_from(choices)))

    def resume(self, saved: Saved | None) -> None:
        self.attempts = self.admission.attempts
        self.begin(saved)

    @invariant()
    def no_group_is_lost(self) -> None:
        if not hasattr(self, "lineage"):
            return
        state, counters = self.admission.state_dict(), self.admission.counters
        assert counters.balanced and counters.rolled_back >= 0
        assert sorted([*self.trained, *state["unsettled"]]) == list(range(state["next_group"])), "a group is lost"
        assert counters.trained == len(self.trained)

    @invariant()
    def something_can_always_happen(self) -> None:
        if not hasattr(self, "lineage"):
            return
        assert self.admission.room or self.tokens or len(self.nodes) >= self.groups, "deadlock"


def run_with_crashes(pace: Pace, groups: int, before: int, lost: int, left: int) -> tuple[int, int]:
    """A run that saves after `before` steps and is killed `lost` steps later, twice; then it goes back to its first
    checkpoint, and from there to the second one, which is of another history.

    `left`: the groups in flight when it is killed that are not finished. Returns the numbers of finished and of
    unfinished groups that were used again.
    """
    run, finished, unfinished = ResumeMachine(), 0, 0
    run.start(groups=groups, pace=pace)
    for attempt in range(4):
        run.work(count=before)
        if attempt < 2:
            run.save()
            run.work(count=1)
            run.tidy()
            run.complete_save()
            run.tidy()
        run.work(count=lost)
        run.admit()
        run.write()
        run.generate()
        for group in sorted(run.tokens)[left:][::-1]:
            run.end(group)
        run.write()
        run.tidy()
        run.resume(run.complete[0 if attempt == 2 else -1])
        finished, unfinished = finished + len(run.nodes), unfinished + len(run.tokens)
        run.admit()
        run.no_group_is_lost()
    run.work(count=4)
    run.no_group_is_lost()
    return finished, unfinished
