"""Log-probs that are computed before their batch is complete: by whom, of what next, and how they reach their trainer.

Pure: every rank keeps an equal `EarlyLedger` from what all ranks were told, so each knows without asking which replica
holds which log-probs. The values themselves stay where they were computed, until a batch says who trains the sample.

Shapes: R the response tokens of one sample, M the numbers of one message.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.queue.streams import OLD_LOGPROBS, REFERENCE_LOGPROBS
from megarl.queue.trajectory import SampleTag
from megarl.trainer.packing import assign_to_ranks

Values = Mapping[str, Mapping[str, Tensor]]  # stream -> key of the sample -> fp32 [R] on the CPU


@dataclass(frozen=True)
class EarlyLogprobs:
    """Holds what a step need not compute any more: `values` of samples of this replica.

    `complete`: the streams that no sample of any replica lacks, equal on all ranks.
    """

    values: Values = field(default_factory=dict)
    complete: frozenset[str] = frozenset()

    def of(self, stream: str) -> Mapping[str, Tensor]:
        """Return the log-probs of a stream by sample."""
        return self.values.get(stream, {})


@dataclass(frozen=True)
class Portion:
    """Work of one short pass per stream. `parts[d]`: the samples of replica d; `missing`: the streams each needs."""

    parts: list[list[str]]
    missing: Mapping[str, Collection[str]]

    def part(self, stream: str, replica: int) -> list[str]:
        """Return the samples of a replica that lack a stream."""
        return [key for key in self.parts[replica] if stream in self.missing[key]]

    def needs(self, stream: str) -> bool:
        """Tell whether a sample of any replica lacks a stream."""
        return any(stream in names for names in self.missing.values())


class MessageEntry(NamedTuple):
    """The log-probs of one sample in a message between two replicas."""

    stream: str
    key: str
    length: int  # response tokens

    def mark(self, version: int) -> int:
        """Return 31 bits that tell this entry from any other one, and from that of other weights."""
        return zlib.crc32(f"{version} {self.stream} {self.key} {self.length}".encode()) & 0x7FFFFFFF


class EarlyLedger:
    """Keeps account of which replica holds which log-probs, of samples of the groups that have finished.

    Old log-probs are those of the weights of `version` and are forgotten with it. Those of the reference stay until
    the group's batch is taken, or the reference takes other weights, so the ledger holds no more than the groups in the
    queue.
    """

    def __init__(self, streams: Sequence[str], only: Mapping[str, Collection[str]] | None = None) -> None:
        """`streams`: the names of the passes. `only`: the data sets of those that are not over all samples."""
        self.streams = tuple(streams)
        self._only = dict(only or {})
        self.version = -1
        self.reference_step = 0
        self.rebuilds = 0  # of the pool: a group that another queue had may have other samples under the same keys
        self.upcoming: list[int] = []
        self._tags: dict[int, list[SampleTag]] = {}
        self._holders: dict[str, dict[str, int]] = {stream: {} for stream in streams}

    def begin(self, version: int, reference_step: int = 0) -> None:
        """Begin the wait for a batch that updates the weights of `version`. Nothing is known to be upcoming yet.

        `reference_step`: the steps after which the reference has taken the policy's weights.
        """
        if version != self.version and OLD_LOGPROBS in self._holders:
            self._holders[OLD_LOGPROBS] = {}
        if reference_step != self.reference_step and REFERENCE_LOGPROBS in self._holders:
            self._holders[REFERENCE_LOGPROBS] = {}
        self.version, self.reference_step, self.upcoming = version, reference_step, []

    def forget(self, rebuilds: int) -> None:
        """Forget all samples and their log-probs: from now on they are those of the queue after `rebuilds` new ones."""
        self.rebuilds, self.upcoming, self._tags = rebuilds, [], {}
        self._holders = {stream: {} for stream in self.streams}

    def concerns(self, stream: str, tag: SampleTag) -> bool:
        """Tell whether a pass is over a sample."""
        return stream not in self._only or tag.dataset in self._only[stream]

    def unknown(self, groups: Iterable[int]) -> list[int]:
        """Return those of `groups` whose tags are not known."""
        return [group for group in groups if group not in self._tags]

    def note_upcoming(self, groups: Sequence[int], tags: Iterable[SampleTag]) -> list[SampleTag]:
        """Record the groups that the batch would have now, and the tags of those that were unknown.

        Returns the tags of all their samples.
        """
        for tag in tags:
            self._tags.setdefault(tag.group_id, []).append(tag)
        self.upcoming = list(groups)
        return [tag for group in groups for tag in self._tags[group]]

    def next_portion(self, wanted: Iterable[SampleTag], replicas: int, limit: int, least: int = 0) -> Portion | None:
        """Return the next samples of `wanted` that lack log-probs, spread over the replicas; None if none does.

        Together with their prompts they have at most `limit` tokens, those of two passes counted twice, or there is
        only one sample. If they are all that lack log-probs, and have fewer than `least` tokens, they are not worth a
        pass.
        """
        chosen: list[SampleTag] = []
        missing: dict[str, list[str]] = {}
        tokens = 0
        for tag in wanted:
            lacking = [
                stream for stream in self.streams if self.concerns(stream, tag) and tag.key not in self._holders[stream]
            ]
            if not lacking:
                continue
            if chosen and tokens + tag.total_tokens * len(lacking) > limit:
                break
            tokens += tag.total_tokens * len(lacking)
            chosen.append(tag)
            missing[tag.key] = lacking
        else:  # more than these does not fit: waiting would not make the portion longer
            if tokens < least:
                return None
        if not chosen:
            return None
        parts = assign_to_ranks([tag.total_tokens for tag in chosen], replicas)
        return Portion([[chosen[index].key for index in part] for part in parts], missing)

    def note_computed(self, portion: Portion) -> None:
        """Record that each replica holds the log-probs of its part."""
        for replica, part in enumerate(portion.parts):
            for key in part:
                for stream in portion.missing[key]:
                    self._holders[stream][key] = replica

    def held(self, stream: str, keys: Iterable[str]) -> list[str]:
        """Return those of `keys` whose log-probs are there."""
        return [key for key in keys if key in self._holders[stream]]

    def messages(
        self, owners: Mapping[str, int], lengths: Mapping[str, int], replicas: int
    ) -> list[list[list[MessageEntry]]]:
        """Return `[sender][receiver]` -> the entries of one message: each sample's log-probs go to its owner.

        `owners`: the replica that trains each sample of the step; `lengths`: response tokens of each.
        """
        result: list[list[list[MessageEntry]]] = [[[] for _ in range(replicas)] for _ in range(replicas)]
        for stream in self.streams:
            for key, owner in owners.items():
                holder = self._holders[stream].get(key)
                if holder is not None:
                    result[holder][owner].append(MessageEntry(stream, key, lengths[key]))
        return result

    def settle(self, groups: Iterable[int]) -> list[tuple[str, str]]:
        """Forget the groups of a batch that was taken, and all old log-probs: the weights are about to change.

        Returns the (stream, sample) whose log-probs are still held.
        """
        gone = {tag.key for group in groups for tag in self._tags.pop(group, [])}
        for stream, holders in self._holders.items():
            kept = {} if stream == OLD_LOGPROBS else {key: at for key, at in holders.items() if key not in gone}
            self._holders[stream] = kept
        self.upcoming = []
        return [(stream, key) for stream, holders in self._holders.items() for key in holders]


def packed(entries: Iterable[MessageEntry], values: Values, version: int) -> Tensor:
    """Return a message, int32 [M]: for each entry its mark, then the bits of its values. Raises ValueError for lengths.

    No arithmetic is done on it, so the values arrive bit for bit.
    """
    parts = [torch.empty(0, dtype=torch.int32)]
    for entry in entries:
        values_R = values[entry.stream][entry.key]
        if values_R.shape != (entry.length,) or values_R.dtype != torch.float32:
            raise ValueError(
                f"sample {entry.key}: {tuple(values_R.shape)} {entry.stream} ({values_R.dtype}) were computed early, "
                f"but the response has {entry.length} tokens"
            )
        parts += [torch.tensor([entry.mark(version)], dtype=torch.int32), values_R.contiguous().view(torch.int32)]
    return torch.cat(parts)


def size_of(entries: Iterable[MessageEntry]) -> int:
    """Return M of the message with these entries."""
    return sum(1 + entry.length for entry in entries)


def unpacked(entries: Sequence[MessageEntry], message_M: Tensor, version: int) -> dict[tuple[str, str], Tensor]:
    """Return the values of a message by (stream, sample). Raises ValueError if it is not that of `entries`."""
    if message_M.shape != (size_of(entries),):
        raise ValueError(f"a message of early log-probs has {message_M.numel()} numbers instead of {size_of(entries)}")
    found: dict[tuple[str, str], Tensor] = {}
    offset = 0
    for entry in entries:
        if int(message_M[offset]) != entry.mark(version):
            raise ValueError(
                f"sample {entry.key}: the {entry.stream} that another replica has sent are not those of its "
                f"{entry.length} tokens under version {version}; this is a bug, the batch must not be trained on"
            )
        found[entry.stream, entry.key] = message_M[offset + 1 : offset + 1 + entry.length].view(torch.float32).clone()
        offset += 1 + entry.length
    return found
