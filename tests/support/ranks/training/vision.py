"""The work of one rank with a policy that sees: log-probs, the gradients of a step, and mistakes made on purpose."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from megarl.checkpoint.save.checkpointer import Checkpointer
from megarl.config.memory_plan.parameters import TrainerRank
from megarl.models.megatron import vision_model
from megarl.models.megatron.vision_model import MultimodalRope, VisionGPTModel
from megarl.trainer.batch import TrainSample
from megarl.trainer.packed_images import ImagePacker
from megarl.trainer.policy import Policy
from tests.support.checkout import PROMPTS
from tests.support.losses.vision_problem import vision_config
from tests.support.ranks.models.layouts import make_layout
from tests.support.ranks.training.policy import built_policy, exported, exported_gradients, own_share

Patches = Mapping[str, np.ndarray]


def run(
    model_dir: Path,
    layout: dict[str, Any],
    samples: list[TrainSample],
    patches: Patches,
    mistake: str = "",
    steps: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """The log-probs of this rank's samples by key; and `steps` updates on them: gradients of the last, weights after.

    `mistake`: a key of MISTAKES, made in all of it.
    """
    with ExitStack() as stack:
        policy = stack.enter_context(built_policy(vision_config(model_dir, **changes), make_layout(**layout)))
        show(policy, patches)
        _, mine = own_share(samples)
        stack.enter_context(MISTAKES[mistake](policy))
        logprobs = dict(zip([sample.key for sample in mine], policy.compute_logprobs(mine), strict=True))
        captured: list[dict[str, Tensor]] = []
        step = policy.optimizer.step

        def capture() -> Any:
            captured.append(exported_gradients(policy))
            return step()

        policy.optimizer.step = capture
        metrics = [policy.update(mine, another_follows=number + 1 < steps) for number in range(steps)]
        return {
            "logprobs": logprobs,
            "metrics": metrics,
            "gradients": captured[-1] if captured else {},
            "weights": exported(policy),
        }


def passes_of_a_step(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], patches: Patches, *, keeps: bool,
    mistake: str = "", **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """The passes of a step with two updates, and one of the next step: log-probs, and what the towers have done.

    `seen`: the patches that the towers of policy and reference see in each of the two steps. `keeps`: the towers may
    keep what they make of images. `kept`: the bytes that they keep of the first step.
    """
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(vision_model, "FEATURE_CACHE_BYTES", vision_model.FEATURE_CACHE_BYTES if keeps else -1)
        )
        config = vision_config(model_dir, **changes)
        policy = stack.enter_context(built_policy(config, make_layout(**layout)))
        stack.enter_context(MISTAKES[mistake](policy))
        show(policy, patches)
        assert policy.reference is not None
        seen: list[list[int]] = []
        for place, chunks in enumerate((policy.module_chunks, policy.reference.chunks)):
            for tower in _towers(chunks):
                tower.visual.patch_embed.register_forward_hook(_counter(seen, place))
        _, mine = own_share(samples)
        logprobs, kept = [], 0
        for _ in range(2):
            policy.show_images({})
            seen.append([0, 0])
            logprobs += [policy.compute_logprobs(mine), policy.compute_logprobs(mine, reference=True)]
            if len(seen) == 1:
                policy.update(mine, another_follows=True)
                logprobs.append(policy.compute_logprobs(mine))
                policy.update(mine)
                kept = sum(part.nbytes for of in policy._feature_caches for parts in of.values() for part in parts)
        planned = TrainerRank.of(config, policy.info, policy.layout, fused=False).feature_cache_bytes()
        return {"logprobs": logprobs, "seen": seen, "kept": kept, "planned": planned}


def _counter(seen: list[list[int]], place: int) -> Callable[[Any, Any, Tensor], None]:
    """A hook that adds its module's outputs to place `place` of the last element of `seen`."""

    def count(module: object, inputs: object, output: Tensor) -> None:
        seen[-1][place] += len(output)

    return count


def save_and_resume(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], patches: Patches, root: Path, **changes: Any
) -> dict[str, Any]:
    """The weights after an update and after another one; the first update is of a checkpoint in `root` if it has one.

    Without one it is made and saved.
    """
    own = {"checkpoint__dir": root, "run__dir": root.with_name(f"{root.name}-run"), "data__path": PROMPTS}
    with built_policy(vision_config(model_dir, **own, **changes), make_layout(**layout)) as policy:
        show(policy, patches)
        _, mine = own_share(samples)
        group = torch.distributed.group.WORLD
        assert group is not None
        checkpointer = Checkpointer(policy.config, policy, group, lambda said: None)
        resumed = checkpointer.restore(lambda chosen: None) is not None
        if not resumed:
            policy.update(mine)
            assert checkpointer.save(1, {}) and checkpointer.poll(wait=True)
        saved = exported(policy)
        policy.update(mine)
        return {"resumed": resumed, "saved": saved, "end": exported(policy)}


def show(policy: Policy, patches: Patches) -> None:
    """Let the policy read patches in place of files."""
    assert policy.images is not None
    policy.images.read = lambda image: torch.from_numpy(patches[image.hash])  # type: ignore[method-assign]


def _towers(chunks: Sequence[torch.nn.Module]) -> Iterator[VisionGPTModel]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, VisionGPTModel) and module.pre_process:
                yield module


def _flat_positions(policy: Policy) -> AbstractContextManager[Any]:
    """Positions of text, 0, 1, 2, … on all three axes."""

    def flat(length: int, images: object) -> np.ndarray:
        return np.tile(np.arange(length), (3, 1))

    return mock.patch("megarl.trainer.packed_images.positions", flat)


def _blank(policy: Policy) -> AbstractContextManager[Any]:
    assert policy.images is not None
    read = policy.images.read
    return mock.patch.object(policy.images, "read", lambda image: torch.zeros_like(read(image)))


def _normalised_twice(policy: Policy) -> AbstractContextManager[Any]:
    features = VisionGPTModel._features

    def twice(self: VisionGPTModel, patches: Tensor, grids: Tensor) -> list[Tensor]:
        again = patches.float().view(len(patches), 3, -1) / 255
        mean, std = (torch.tensor(each)[:, None] for each in (self.tower.mean, self.tower.std))
        return features(self, ((again - mean) / std).flatten(1), grids)

    return mock.patch.object(VisionGPTModel, "_features", twice)


@contextmanager
def _summed_over_tensor_ranks(policy: Policy) -> Iterator[None]:
    """Mark the tower's gradients as shares of the tensor ranks, as those of layer norms are under SP."""
    for tower in _towers(policy.module_chunks):
        for parameter in tower.visual.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
    yield


@contextmanager
def _axes_in_blocks(policy: Policy) -> Iterator[None]:
    """The axes of RoPE in blocks where they alternate, and the other way round."""
    for chunk in policy.module_chunks:
        for module in chunk.modules():
            if isinstance(module, MultimodalRope):
                module._axes_F = module._axes_F.flip(0)
    yield


def _deepstack_one_layer_late(policy: Policy) -> AbstractContextManager[Any]:
    for tower in _towers(policy.module_chunks):
        for layer in tower.decoder.layers:
            layer._forward_hooks.clear()
            layer._forward_hooks_with_kwargs.clear()
        for index in range(len(tower.tower.deepstack)):
            tower.decoder.layers[index + 1].register_forward_hook(vision_model._adds_features(index), with_kwargs=True)
    return nullcontext()


def _kept_behind_the_projector(policy: Policy) -> AbstractContextManager[Any]:
    """Keep the features of a pass without gradients, although the projector that makes them is trained."""
    features_of, made = VisionGPTModel._cached_features, dict[tuple[Any, ...], list[Tensor]]()

    def kept(self: VisionGPTModel, images: vision_model.ImageBatch) -> list[Tensor]:
        key = (id(self), images.keys)
        if torch.is_grad_enabled():
            return features_of(self, images)
        if key not in made:
            made[key] = features_of(self, images)
        return made[key]

    return mock.patch.object(VisionGPTModel, "_cached_features", kept)


def _of_other_chunks(policy: Policy) -> AbstractContextManager[Any]:
    """The features of each image from its first one on, although another context-parallel rank has that token."""
    pack = ImagePacker.pack

    def wrong(*arguments: Any) -> vision_model.ImageBatch | None:
        batch = pack(*arguments)
        return batch and replace(batch, features_I=torch.arange(len(batch.features_I)) % (batch.features_I.max() + 1))

    return mock.patch.object(ImagePacker, "pack", wrong)


MISTAKES: dict[str, Callable[[Policy], AbstractContextManager[Any]]] = {
    "": lambda policy: nullcontext(),
    "flat positions": _flat_positions,
    "blank image": _blank,
    "normalised twice": _normalised_twice,
    "summed over tensor ranks": _summed_over_tensor_ranks,
    "axes in blocks": _axes_in_blocks,
    "deepstack one layer late": _deepstack_one_layer_late,
    "kept behind the projector": _kept_behind_the_projector,
    "features of other chunks": _of_other_chunks,
}
