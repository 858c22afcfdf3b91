"""A save begins only when the threads of earlier ones have ended, on every rank."""

import threading
from typing import Any

import pytest
import torch

from megarl.checkpoint.save import checkpointer as module
from megarl.checkpoint.save.checkpointer import Checkpointer


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Checkpointer:
    """A checkpointer whose rank is alone, and which has not saved."""
    made = Checkpointer.__new__(Checkpointer)
    made._group, made._threads = None, []  # type: ignore[assignment]

    def one_rank(*arguments: Any, **options: Any) -> None: ...

    monkeypatch.setattr(torch.distributed, "all_reduce", one_rank)
    return made


def test_a_thread_that_is_about_to_end_fails_no_save(alone: Checkpointer) -> None:
    """Rank 0 has the report of a thread of another rank before that thread has ended."""
    reported = threading.Event()
    thread = threading.Thread(target=lambda: reported.wait(60))
    thread.start()
    threading.Timer(0.05, reported.set).start()
    alone._threads = [thread]
    assert not alone._still_writing() and alone._threads == []


def test_a_thread_that_hangs_is_waited_for_briefly_and_fails_the_save(
    alone: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN_S", 0.01)
    release = threading.Event()
    thread = threading.Thread(target=lambda: release.wait(60))
    thread.start()
    alone._threads = [thread]
    assert alone._still_writing() and alone._threads == [thread]
    release.set()
