"""Sizes of a layout, and which ones Megatron cannot run."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.config.derived.pools import trainer_layout
from megarl.config.schema import ParallelConfig
from megarl.models.megatron.layout import Layout


class TestLayout:
    def test_sizes(self) -> None:
        layout = trainer_layout(ParallelConfig(tensor=2, pipeline=2, expert=4, expert_tensor=1), gpus=16)
        assert (layout.data, layout.expert_data, layout.etp) == (4, 2, 1)
        assert Layout(tensor=4, world_size=8).expert_tensor == 4
        layout = trainer_layout(ParallelConfig(tensor=2, context=2, expert=8, expert_tensor=1), gpus=32)
        assert (layout.data, layout.dense_data, layout.expert_data) == (8, 16, 4)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"tensor": 3, "world_size": 4}, "are not divisible by tensor x context x pipeline = 3"),
            ({"context": 2, "tensor": 2, "world_size": 2}, "are not divisible by tensor x context x pipeline = 4"),
            ({"expert": 8, "world_size": 4}, "expert_tensor x expert x pipeline = 8"),
            ({"sequence": True, "world_size": 2}, "needs tensor > 1"),
            ({"virtual_pipeline": 2, "world_size": 2}, "needs pipeline > 1"),
            ({"pipeline_layout": "EttL"}, "need pipeline > 1"),
        ],
    )
    def test_what_megatron_cannot_run_is_refused(self, sizes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Layout(**sizes)


@pytest.mark.parametrize(
    ("layers", "sizes", "stages"),
    [
        (61, {"pipeline": 8, "last_stage_layers": 5}, (*[8] * 7, 5)),
        (61, {"pipeline": 8, "first_stage_layers": 7, "last_stage_layers": 6}, (7, *[8] * 6, 6)),
        (61, {"pipeline": 16, "first_stage_layers": 3, "last_stage_layers": 2}, (3, *[4] * 14, 2)),
        (10, {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 4}, (4, 6)),
        (16, {"pipeline": 4, "virtual_pipeline": 2}, (4, 4, 4, 4)),
        (12, {"pipeline": 4, "virtual_pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 2}, (2, 4, 4, 2)),
    ],
)
def test_stages_have_the_layers_that_megatron_gives_them(
    layers: int, sizes: dict[str, int], stages: tuple[int, ...]
) -> None:
    layout = Layout(**sizes, world_size=sizes["pipeline"])
    assert layout.stage_layers(layers) == stages
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
    )
    for stage in range(layout.pipeline):
        for chunk in range(layout.virtual_pipeline or 1):
            virtual = chunk if layout.virtual_pipeline else None
            first = get_transformer_layer_offset(config, vp_stage=virtual, pp_rank=stage)
            count = get_num_layers_to_build(config, vp_stage=virtual, pp_rank=stage)
            assert layout.chunk_layers(layers, stage, chunk) == range(first, first + count)


TEXTS = [
    (61, 8, 2, "Et*3|" + "t*4|" * 14 + "ttL"),
    (61, 16, None, "Ettt,|(t*4|)*14,ttL"),
    (10, 2, 2, "Ettt|ttt|tttt|L"),  # a chunk of the output layer alone
    (10, 4, None, "E|ttttt|ttttt|L"),
    (61, 8, None, "Et*7|(t*8|)*6t*6L"),
]


@pytest.mark.parametrize(("layers", "pipeline", "virtual", "text"), TEXTS)
def test_a_text_means_what_it_means_to_megatron(layers: int, pipeline: int, virtual: int | None, text: str) -> None:
    layout = Layout(pipeline=pipeline, virtual_pipeline=virtual, pipeline_layout=text, world_size=pipeline)
    theirs = PipelineParallelLayerLayout(text, pipeline)
    theirs.validate_layer_layout(layers, 0)
    counts = [[part.count(LayerType.decoder) for part in stage] for stage in theirs.layout]
    assert layout.stage_layers(layers) == tuple(map(sum, counts))
    assert layout.most_layers(layers) == max(map(max, counts))
    order = []
    for chunk in range(virtual or 1):
        for stage in range(pipeline):
            held = layout.chunk_layers(layers, stage, chunk)
            assert len(held) == counts[stage][chunk]
            order += held
    assert order == list(range(layers))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline_layout": "Et|tL"}, "2 stages, but pipeline x virtual_pipeline is 4 x 1"),
        ({"pipeline_layout": "Et|t|t|t|t|t|t|tL"}, "8 stages, but pipeline x virtual_pipeline is 4 x 1"),
        ({"pipeline_layout": "Et|t|t|t"}, "is not E"),
        ({"pipeline_layout": "tE|t|t|tL"}, "is not E"),
        ({"pipeline_layout": "Et|t|t|tmL"}, "is not E"),
        ({"pipeline_layout": "Et*9999|t|t|tL"}, "is not E"),
        ({"pipeline_layout": "Et|t|t|tL", "first_stage_layers": 1}, "sets every stage"),
    ],
)
def test_texts_that_do_not_fit_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**sizes, pipeline=4, world_size=4)


@pytest.mark.parametrize(
    ("layers", "sizes", "message"),
    [
        (5, {"pipeline": 2, "pipeline_layout": "Et|ttL"}, r"'Et\|ttL' has 3 layers"),
        (61, {"pipeline": 8}, "61 layers cannot be split over 8"),
        (61, {"pipeline": 8, "last_stage_layers": 6}, "55 layers cannot be split over 7"),
        (4, {"pipeline": 2, "first_stage_layers": 4}, "0 layers cannot be split over 1"),
        (10, {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 5}, "the 5 layers"),
    ],
)
def test_stages_that_cannot_be_are_refused(layers: int, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**sizes, world_size=sizes["pipeline"]).stage_layers(layers)
