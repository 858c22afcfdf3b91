"""The store in which the writing threads of all ranks report: rank 0 serves it, where the other ranks reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.save import checkpointer as module
from megarl.checkpoint.save.checkpointer import Checkpointer
from megarl.common.bound_store import NODE_ADDRESS_VARIABLE
from megarl.common.run_secret import run_secret
from tests.support.configs import config


@pytest.mark.parametrize(("rank", "host"), [(0, "10.0.0.8"), (1, None)])
def test_rank_0_serves_the_store_at_the_address_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, host: str | None
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(module, "open_shared_store", lambda *arguments: opened.append(arguments))
    monkeypatch.setenv(NODE_ADDRESS_VARIABLE, "10.0.0.8")
    checkpointer = object.__new__(Checkpointer)
    checkpointer.config, checkpointer._rank = config("model", run__dir=str(tmp_path)), rank
    checkpointer._open_store()
    [(name, secret, served_at, _)] = opened
    assert (name, secret, served_at) == ("checkpoint", run_secret(tmp_path), host)
