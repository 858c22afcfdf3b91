"""Decides whether a replica's engine may generate with the weights that it holds. Pure.

Between the start of a weight sync and its end the weights are of two versions, and after a sync that another member's
failure has interrupted they stay so until a later sync has loaded all of them. The engine is paused all that time and
keeps its requests. Nothing may resume it, or give it a clean start, before: this is the one place that decides it.
"""

from __future__ import annotations


class WeightState:
    """The state of one engine's weights. What is about to begin is recorded before, what has ended afterwards."""

    def __init__(self, has_weights: bool) -> None:
        """`has_weights`: the engine has read the model's files, and not begun with random weights."""
        self.has_weights = has_weights
        self._joining = False  # the group of the sync; after a failure the engine may wait for the other members
        self.in_session = False
        self._loading = False  # in this session
        self._mixed = False  # since an interrupted session

    @property
    def obstacle(self) -> str | None:
        """The reason why the engine must not generate, or None if nothing speaks against it but missing weights."""
        if self.in_session or self._joining:
            return "was left in the middle of a weight sync"
        if self._mixed:
            return "holds weights of two versions since an interrupted weight sync"
        return None

    def join(self) -> None:
        """The engine is about to join the group of a sync."""
        self._joining = True

    def joined(self) -> None:
        """The engine has joined the group."""
        self._joining = False

    def begin(self) -> None:
        """A session is about to begin."""
        self.in_session, self._loading = True, False

    def receive(self) -> None:
        """Weights are about to come, which replace those of the model."""
        self._loading = True

    def abandoned(self) -> None:
        """The session was given up."""
        self._mixed |= self._loading
        self.in_session = self._loading = False

    def finished(self) -> None:
        """The session has ended, and the engine has loaded all weights of a new version."""
        self._mixed, self.has_weights = False, True
        self.in_session = self._loading = False
