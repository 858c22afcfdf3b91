"""Sizes of a layout, and which ones Megatron cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.derived.pools import trainer_layout
from megarl.config.schema import ParallelConfig
from megarl.models.megatron.layout import Layout


class TestLayout:
    def test_sizes(self) -> None:
        layout = trainer_layout(ParallelConfig(tensor=2, pipeline=2, expert=4, expert_tensor=1), gpus=16)
        assert (layout.data, layout.expert_data, layout.etp) == (4, 2, 1)
        assert Layout(tensor=4, world_size=8).expert_tensor == 4

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"tensor": 3, "world_size": 4}, "are not divisible by tensor x pipeline = 3"),
            ({"expert": 8, "world_size": 4}, "expert_tensor x expert x pipeline = 8"),
            ({"sequence": True, "world_size": 2}, "needs tensor > 1"),
            ({"virtual_pipeline": 2, "world_size": 2}, "needs pipeline > 1"),
        ],
    )
    def test_what_megatron_cannot_run_is_refused(self, sizes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Layout(**sizes)
