"""Builds trajectories from engine results. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

from megarl.common.values import changed
from megarl.queue.routes import Routes, RoutesSpec, joined
from megarl.queue.streams import STREAMS, stream_row
from megarl.queue.trajectory import FinishReason, Trajectory, VersionSpan, first_bad_logprob
from megarl.rewards.types import RewardResult
from megarl.rollout.engine.messages import GenerateResult


def generation_failure(result: GenerateResult) -> str:
    """Return why the engine failed to produce a valid response; empty if it succeeded."""
    if result.failure:
        return result.failure
    if not result.response_ids:
        return "empty response"
    if result.finish_reason == "abort":
        return "aborted"
    if (position := first_bad_logprob(result.logprobs)) is not None:
        return f"log-prob {result.logprobs[position]} at response token {position}"
    return ""


def defect(result: GenerateResult) -> str:
    """Return why a sample cannot be trained on (failed generation, tokens without a weight version); else empty."""
    if failure := generation_failure(result):
        return failure
    covered = 0
    for span in result.versions:
        if span.start != covered:
            return f"no weight version for response token {covered}"
        covered = span.end
    if covered != len(result.response_ids):
        return f"weight versions cover {covered} of {len(result.response_ids)} tokens"
    return ""


def failed_trajectory(group_id: int, sample_index: int, reason: str) -> Trajectory:
    """Return the trajectory of a sample without generated tokens."""
    return Trajectory(
        group_id=group_id,
        sample_index=sample_index,
        prompt_ids=[],
        response_ids=[],
        rollout_logprobs=[],
        versions=(),
        finish_reason="abort",
        reward=0.0,
        status="failed",
        failure=reason,
    )


def trajectory(
    group_id: int, sample_index: int, prompt_ids: list[int], result: GenerateResult, outcome: RewardResult | None
) -> Trajectory:
    """Return the trajectory of one response. `outcome` is None if the sample failed and was not scored.

    Raises ValueError if a valid sample has no outcome.
    """
    failure = defect(result)
    if outcome is None and not failure:
        raise ValueError(f"sample {group_id}:{sample_index} is valid but was not judged")
    return row_of(group_id, sample_index, prompt_ids, result, outcome, failure, [0])


def row_of(
    group_id: int,
    sample_index: int,
    prompt_ids: list[int],
    result: GenerateResult,
    outcome: RewardResult | None,
    failure: str,
    starts: list[int],
    mask: list[int] | None = None,
) -> Trajectory:
    """Return a row. `starts`: the first token of each of the model's turns. `mask`: None if all tokens were sampled."""
    by_turn = list(outcome.turn_rewards) if outcome is not None else []
    if by_turn and len(by_turn) != len(starts):
        raise ValueError(
            f"sample {group_id}:{sample_index} has rewards for {len(by_turn)} turns, but the model had {len(starts)}: "
            "an agent loop must pass `judge` the turns that it returns"
        )
    error = outcome.error or "" if outcome is not None else ""
    if outcome is not None and outcome.dropped:
        failure = failure or error
    return Trajectory(
        group_id=group_id,
        sample_index=sample_index,
        prompt_ids=prompt_ids,
        response_ids=result.response_ids,
        rollout_logprobs=result.logprobs,
        versions=result.versions,
        finish_reason=result.finish_reason,
        reward=outcome.score if outcome is not None else 0.0,
        reward_components=dict(outcome.components) if outcome is not None else {},
        status="failed" if failure else "ok",
        failure=failure,
        reward_error=error,
        turn_rewards=by_turn,
        turn_starts=starts if by_turn else [],
        response_mask=mask or [],
        routes=result.routes,
    )


def dialogue_trajectory(
    group_id: int,
    sample_index: int,
    prompt_ids: list[int],
    results: Sequence[GenerateResult],
    inserted: Sequence[Sequence[int]],
    outcome: RewardResult | None,
    *,
    finish_reason: FinishReason,
    failure: str = "",
) -> Trajectory:
    """Return the trajectory of several model turns, `results`.

    `inserted[i]`: the tokens between turns i and i + 1; they have mask 0, log-prob 0 and no version. Tokens after the
    last turn are dropped. `failure`: why the sample cannot be used; then it has no outcome. Raises ValueError if a
    valid sample has no outcome, or one for another number of turns.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    spans: list[VersionSpan] = []
    starts: list[int] = []
    routes: Routes | None = None
    for turn, result in enumerate(results):
        starts.append(len(ids))
        offset, after = len(ids), list(inserted[turn]) if turn + 1 < len(results) else []
        spans += [changed(span, start=span.start + offset, end=span.end + offset) for span in result.versions]
        ids += result.response_ids
        ids += after
        if result.routes is not None:  # a turn's prompt is everything before it, mostly known already
            read = len(prompt_ids) + offset + len(result.response_ids) - 1
            missing = read - (0 if routes is None else len(routes))
            routes = joined(routes, result.routes.of(max(0, len(result.routes) - missing)))
        logprobs += result.logprobs
        logprobs += [0.0] * len(after)
        mask += [1] * len(result.response_ids)
        mask += [0] * len(after)
    if not ids:
        return failed_trajectory(group_id, sample_index, failure or "empty response")
    versions = tuple(spans)
    whole = GenerateResult("", ids, logprobs, versions, finish_reason, -1, failure=failure, routes=routes)
    if outcome is None and not failure:
        raise ValueError(f"sample {group_id}:{sample_index} is valid but was not judged")
    return row_of(group_id, sample_index, prompt_ids, whole, outcome, failure, starts, mask)


def check_trajectory(row: Trajectory, group_id: int, sample_index: int) -> None:
    """Check what an agent loop returned. Raises ValueError naming the sample and the problem."""
    if (row.group_id, row.sample_index) != (group_id, sample_index):
        raise ValueError(f"the agent loop of sample {group_id}:{sample_index} returned a trajectory of {row.key}")
    for name, number in {"reward": row.reward, **row.reward_components}.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            kind = type(number).__name__
            raise ValueError(f"sample {row.key}: the agent loop returned {name} as a {kind}; return float({name})")
    tokens = len(row.response_ids)
    _check_turns(row, tokens)
    for name, values in (("response_mask", row.response_mask), ("rollout_logprobs", row.rollout_logprobs)):
        if len(values) != tokens:
            raise ValueError(f"sample {row.key}: {name} has {len(values)} values for {tokens} response tokens")
    for name in row.streams:
        stream = STREAMS[name]
        if stream.made_by != "rollout":
            raise ValueError(f"sample {row.key}: stream {name!r} is made by the trainer, not by an agent loop")
        stream_row(stream, row)
    if row.status == "ok":
        missing = None if row.demonstrated else _without_version(row)
        if not tokens or missing is not None:
            what = f"no weight version for response token {missing}" if tokens else "no response token"
            raise ValueError(f"sample {row.key}: {what}")


def _check_turns(row: Trajectory, tokens: int) -> None:
    """Check a row's turn rewards. Raises ValueError."""
    starts = row.turn_starts
    if len(row.turn_rewards) != len(starts):
        raise ValueError(f"sample {row.key}: {len(row.turn_rewards)} turn_rewards, but {len(starts)} turn_starts")
    if any(not before < after for before, after in zip([-1, *starts], [*starts, tokens], strict=True)):
        raise ValueError(f"sample {row.key}: turn_starts {starts} do not rise within {tokens} response tokens")
    if not all(math.isfinite(reward) for reward in row.turn_rewards):
        raise ValueError(f"sample {row.key}: a reward of a turn is not finite: {row.turn_rewards}")


def _without_version(row: Trajectory) -> int | None:
    """Return the first sampled token that no span covers; None if there is none."""
    covered, mask = 0, row.response_mask
    ends = [(span.start, span.end) for span in sorted(row.versions, key=lambda span: span.start)]
    for start, end in [*ends, (len(mask), len(mask))]:
        if any(gap := mask[covered:start]):
            return covered + next(token for token, sampled in enumerate(gap) if sampled)
        covered = max(covered, end)
    return None


def fail_without_routes(rows: list[Trajectory], spec: RoutesSpec) -> list[Trajectory]:
    """Return a sample's rows; mark all as failed if any has no valid routes."""
    problems = [spec.problem(row.routes, len(row.prompt_ids) + len(row.response_ids) - 1) for row in rows]
    if not any(problems) or rows[0].status == "failed":
        return rows
    failure = next(filter(None, problems))
    return [replace(row, status="failed", failure=failure) for row in rows]


# All rows of a sample share these.
_SHARED = ("reward", "reward_components", "status", "failure", "reward_error")


def sample_rows(made: Trajectory | Sequence[Trajectory], group_id: int, sample_index: int) -> list[Trajectory]:
    """Check what an agent loop returned, and number it as parts 0, 1, ... of the sample.

    Raises ValueError naming the sample and the problem: an invalid row (`check_trajectory`), rows that differ in
    reward, status or presence of turn rewards, or one of several rows without a sampled token.
    """
    rows = [made] if isinstance(made, Trajectory) else list(made)
    name = f"sample {group_id}:{sample_index}"
    if not rows:
        raise ValueError(f"{name}: the agent loop returned no trajectory; return a failed one instead")
    for number, row in enumerate(rows):
        check_trajectory(row, group_id, sample_index)
        for shared in _SHARED:
            if getattr(row, shared) != getattr(rows[0], shared):
                raise ValueError(
                    f"{name}: its trajectories 0 and {number} differ in {shared}; all trajectories of a sample have "
                    "the sample's reward and status"
                )
        if bool(row.turn_rewards) != bool(rows[0].turn_rewards):
            raise ValueError(f"{name}: of its trajectories 0 and {number} only one has turn_rewards")
        if len(rows) > 1 and row.status == "ok" and not any(row.response_mask):
            raise ValueError(f"{name}: its trajectory {number} of {len(rows)} has no token that the model sampled")
    return rows if len(rows) == 1 and not rows[0].part else [replace(row, part=n) for n, row in enumerate(rows)]
