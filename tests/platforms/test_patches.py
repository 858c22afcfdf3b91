"""Each patch of Megatron-Core: the defect shows without it, and not with it."""

import inspect
from collections.abc import Callable

import pytest
import torch

from megarl.platforms import patches
from tests.support.worlds.world import World


def test_every_patch_says_what_it_is_for() -> None:
    functions = {
        function
        for name, function in inspect.getmembers(patches, inspect.isfunction)
        if function.__module__ == patches.__name__ and not name.startswith("_") and name not in ("apply", "rebind")
    }
    assert functions == set(patches.PATCHES)
    assert all(".py" in (patch.__doc__ or "") for patch in patches.PATCHES)


@pytest.mark.world
def test_all_to_all_split_sizes(world: Callable[[int], World]) -> None:
    for before, after in world(2).run("tests.support.ranks.models.megatron_defects:all_to_all_with_tensors"):
        assert before == "TypeError"
        assert after == 1 + 2


@pytest.mark.world
def test_a_save_leaves_no_manager_process(world: Callable[[int], World]) -> None:
    [(before, after)] = world(1).run("tests.support.ranks.models.megatron_defects:manager_processes")
    assert before > 0 and after == 0


@pytest.mark.world
def test_norm_recompute_without_transformer_engine(world: Callable[[int], World]) -> None:
    for before, after, plain in world(2).run("tests.support.ranks.models.megatron_defects:norm_recompute"):
        assert before == "NameError"
        assert after == pytest.approx(plain, rel=1e-6)


@pytest.mark.world
def test_recompute_needs_no_compiler(world: Callable[[int], World]) -> None:
    [(before, after)] = world(1).run("tests.support.ranks.models.megatron_defects:compiling_recompute")
    assert before == "OSError"
    assert isinstance(after, list) and after[0] > 0


@pytest.mark.world
@pytest.mark.parametrize("sequence", [False, True])
def test_the_rotated_key_of_latent_attention_gets_every_ranks_gradients(
    world: Callable[[int], World], sequence: bool
) -> None:
    results = world(2).run("tests.support.ranks.models.megatron_defects:latent_attention_defects", sequence=sequence)
    assert results[0][0] < 1e-5 and results[1][0] > 1e-3  # the second rank holds the rotated key's rows
    assert all(after < 1e-5 for _, after in results)


@pytest.mark.world
def test_queries_that_are_not_compressed_have_no_norm(world: Callable[[int], World]) -> None:
    [(before, after)] = world(1).run("tests.support.ranks.models.megatron_defects:uncompressed_queries")
    assert before != after == ["weight"]


@pytest.mark.world
def test_padding_weighs_nothing_in_a_mixture_of_experts(world: Callable[[int], World]) -> None:
    unpatched, patched = world(1).run("tests.support.ranks.models.megatron_defects:padding_only_counts")[0]
    assert torch.isnan(unpatched) and patched == 0
    for unpatched, patched in world(2).run("tests.support.ranks.models.megatron_defects:padded_counts"):
        assert unpatched == (3.0, 3.0) and patched == (1.5, 3.0)
    unpatched, patched = world(1).run("tests.support.ranks.models.megatron_defects:expert_bias_of_padding")[0]
    assert "size" in unpatched and patched == [1.0, 1.0, 0.0]
