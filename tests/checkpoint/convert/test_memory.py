"""The memory of a conversion does not depend on the size of the model: what a unit needs is given back."""

from pathlib import Path

from tests.support.checkpoints.converter import convert
from tests.support.measures.live_bytes import LiveBytes
from tests.support.models.tiny import make_tiny_model

LAYERS = (2, 12)


def peak(*arguments: object) -> int:
    """The most bytes of tensors that a conversion makes and holds at a time; a single worker is this process."""
    with LiveBytes() as live:
        convert(*arguments, "--workers", 1)
    return live.peak


def test_six_times_the_layers_take_no_more_memory(tmp_path: Path) -> None:
    peaks: dict[str, list[int]] = {"import": [], "export": []}
    for layers in LAYERS:
        source = make_tiny_model(tmp_path / f"{layers}", num_hidden_layers=layers)
        megatron, out = tmp_path / f"{layers}-megatron", tmp_path / f"{layers}-hf"
        peaks["import"].append(peak("import", "--hf", source, "--out", megatron))
        peaks["export"].append(peak("export", "--megatron", megatron, "--hf", out))
    for small, large in peaks.values():
        assert 0 < small <= large <= 1.1 * small
