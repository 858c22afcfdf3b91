"""Random interleavings of controller, engines and trainer around an `Admission`; the bound is checked by definition."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megarl.config.derived.staleness import Pace
from megarl.rollout.admission.admission import Admission


@st.composite
def paces(draw: st.DrawFn) -> Pace:
    """Any relation of generation to training that a config allows, with small numbers."""
    updates, steps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    interval = updates * steps
    if draw(st.booleans()):
        return Pace(updates, interval, interval - 1, in_turns=True)
    return Pace(updates, interval, interval - 1 + draw(st.integers(0, 2 * interval)))


class AdmissionMachine(RuleBasedStateMachine):
    """Random interleavings of what controller, engines and trainer do.

    A group's tokens have the versions that were published while it was in flight. The bound is checked by the
    definition, on the update that trains the group.
    """

    @initialize(
        groups=st.integers(1, 4),
        pace=paces(),
        first=st.integers(0, 3),
        refill=st.integers(0, 3),
        max_uses=st.integers(1, 3),
    )
    def start(self, groups: int, pace: Pace, first: int, refill: int, max_uses: int) -> None:
        self.max_uses = max_uses
        self.admission, self.pace = self.make(groups, pace, refill), pace
        self.uses: dict[int, int] = {}  # of the groups that were trained in this history
        self.rows: set[int] = set()  # of finished groups that were not released
        self.reused = 0
        self.replaced: list[int] = []  # since the last step
        self.running: dict[int, int] = {}  # group -> version at its start
        self.oldest: dict[int, int] = {}  # of the groups that have finished
        self.seen: list[int] = []
        self.ended: dict[int, str] = {}
        self.updates = first  # made by the trainer
        self.published, self.step = -1, 0
        self.versions: list[int] = []  # all that were published
        self.publish()

    def make(self, groups: int, pace: Pace, refill: int) -> Admission:
        return Admission(groups, pace, refill=refill, max_uses=self.max_uses)

    def publish(self) -> None:
        self.published = self.updates
        self.versions.append(self.published)
        self.admission.set_version(self.published)

    @rule()
    def admit(self) -> None:
        new = self.admission.admit()
        assert not set(new) & set(self.seen)
        assert self.admission.admit() == [] and self.admission.room == 0
        self.release()
        self.seen += new
        self.running |= dict.fromkeys(new, self.published)

    def release(self) -> None:
        released = self.admission.take_released()
        assert self.rows >= set(released), "rows are released twice"
        self.rows -= set(released)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ok=st.booleans(), has_tokens=st.booleans())
    def finish(self, data: st.DataObject, ok: bool, has_tokens: bool) -> None:
        group = data.draw(st.sampled_from(sorted(self.running)))
        started = self.running.pop(group)
        versions = [version for version in self.versions if version >= started] if has_tokens else []
        versions = versions[data.draw(st.integers(0, len(versions) - 1)) :] if versions else []
        self.oldest[group] = min(versions, default=started)
        self.rows.add(group)
        self.admission.finish(group, ok, versions)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.running)))
        replaced = self.admission.replace(group, [self.published])
        assert replaced == (len(self.replaced) < self.admission.refill)
        if replaced:
            del self.running[group]
            self.replaced.append(group)

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        taken = self.admission.batch(self.step)
        assert taken == self.admission.batch(self.step)
        if taken is None:
            return
        ok, bad = taken
        again = sorted(self.admission.taken(self.step).reused)
        assert len(ok) + len(bad) + len(again) == self.admission.groups and ok + bad
        assert all(group in self.rows and self.uses.get(group, 0) < self.max_uses for group in again)
        self.uses |= {group: self.uses[group] + 1 for group in again}
        last_update = self.updates + self.pace.updates_per_step - 1
        assert all(last_update - self.oldest[group] <= self.pace.max_staleness for group in ok + bad + again)
        left = set(self.oldest) - set(ok + bad) - set(self.ended)
        assert all(self.oldest[group] >= max(self.oldest[taken] for taken in ok + bad) for group in left)
        assert not (again and left)
        ends = [data.draw(st.sampled_from(["trained", "filtered", "dropped_stale", "failed"])) for _ in ok]
        assert self.admission.taken(self.step).replaced == sorted(self.replaced)
        self.ended |= dict.fromkeys(self.replaced, "filtered")
        numbers = {name: ends.count(name) for name in ("trained", "filtered", "dropped_stale")}
        numbers["filtered"] += len(self.replaced)
        self.replaced = []
        trained = [group for group, end in zip(ok, ends, strict=True) if end == "trained"]
        uses = {"reused": len(again), "trained_groups": trained} if self.max_uses > 1 else {}
        self.admission.commit(self.step, **numbers, failed=ends.count("failed") + len(bad), **uses)
        self.uses |= dict.fromkeys(trained, 1)
        self.reused += len(again)
        self.release()
        for group, end in zip(ok + bad, ends + ["failed"] * len(bad), strict=True):
            assert group not in self.ended
            self.ended[group] = end
        self.step += 1
        self.updates += self.pace.updates_per_step
        if self.pace.publishes_after(self.step):
            self.publish()

    @rule(data=st.data())
    def whole_step(self, data: st.DataObject) -> None:
        """Start, end and train groups, most or all that can: by single events, few examples get to a second step."""
        self.admit()
        left = data.draw(st.sampled_from([0, 0, 0, 1, 2]))
        while len(self.running) > left:
            if len(self.replaced) < self.admission.refill and data.draw(st.integers(0, 7)) == 7:
                self.replace(data)
            else:
                self.finish(data, data.draw(st.booleans()), data.draw(st.booleans()))
        self.train(data)

    @rule()
    def resume(self) -> None:
        old = self.admission
        state, fresh = old.state_dict(), self.make(old.groups, self.pace, old.refill)
        fresh.load_state_dict(state)
        assert fresh.counters.admitted == fresh.counters.settled == len(self.ended)
        assert fresh.admit() == []  # the engines may have no weights yet
        assert fresh.counters.reused == self.reused and fresh.counters.reusable == 0
        self.admission, self.running, self.replaced = fresh, {}, []
        self.rows, self.uses = set(), dict.fromkeys(self.uses, self.max_uses)  # none of them is used again
        self.seen = sorted(self.ended)
        self.oldest = {group: version for group, version in self.oldest.items() if group in self.ended}
        self.publish()

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "admission"):
            return
        counters = self.admission.counters
        assert counters.balanced
        assert counters.admitted == len(set(self.seen)) and counters.in_flight == len(self.running)
        assert counters.settled == len(self.ended) and counters.replaced == len(self.replaced)
        assert counters.trained == list(self.ended.values()).count("trained")
        waiting = len(set(self.oldest) - set(self.ended))
        assert counters.reused == self.reused and counters.reusable == len(self.rows) - waiting

    @invariant()
    def something_can_always_happen(self) -> None:
        """No deadlock: a group can start, one is in flight, or the next step has its groups."""
        if not hasattr(self, "admission"):
            return
        ready = set(self.oldest) - set(self.ended)
        assert self.admission.room or self.running or len(ready) >= self.admission.groups
