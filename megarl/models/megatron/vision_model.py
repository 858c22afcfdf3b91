"""The GPTModel of a vision-language model: image features replace the image tokens before the first layer.

The vision tower is Hugging Face's module, whole on every tensor rank of the first pipeline stage. Features are inserted
into the embeddings of all tokens, and the sequence is then split over the tensor ranks. The backward pass of the split
gathers, so each tensor rank has the tower's full gradient and none is summed over them.

The outputs of a frozen tower, or of the frozen part before a trained projector, are cached until the end of the step,
for the other samples of an image and for the other passes.

Shapes: T packed tokens of this rank, W of all context-parallel ranks, I image tokens among T, N distinct images,
P patches, C values per patch, M image features (P / merge²), H hidden size of the language model, F frequencies of its
RoPE, one per two channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megarl import platforms
from megarl.models.architecture.architecture import ModelInfo, VisionTower
from megarl.models.architecture.rope import inverse_frequencies
from megarl.models.families.vision import FEATURE_CACHE_BYTES, TOWER, Trained, trains

ImageKey = tuple[str, int, int]  # hash, height and width of an image, which determine its features


@dataclass(frozen=True)
class ImageBatch:
    """The images of a packed micro-batch, each distinct one once."""

    keys: tuple[ImageKey, ...]
    grids_N3: Tensor  # int64: 1, and height and width of each image in patches
    rows_I: Tensor  # int64: the row of T of each image token
    features_I: Tensor  # int64: the row of M that belongs there
    read: Callable[[Sequence[int]], Tensor]  # returns patches of images, given by index: uint8 [P, C] on the CPU

    def to(self, device: torch.device) -> ImageBatch:
        """Return the same batch with its indices on `device`. Patches move when they are read."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("rows_I", "features_I")}
        return replace(self, grids_N3=self.grids_N3.to(device), **moved)


class MultimodalRope(torch.nn.Module):
    """RoPE angles of positions on three axes: time, height, width.

    Megatron-Core's module cannot interleave the axes, and with context parallelism it cuts the packed row, not its
    sequences.
    """

    def __init__(self, frequencies_F: Tensor, tower: VisionTower) -> None:
        super().__init__()
        sizes = torch.tensor(tower.rope_sections)
        if int(sizes.sum()) != len(frequencies_F):
            raise ValueError(f"mrope_section {tower.rope_sections} does not add up to {len(frequencies_F)} frequencies")
        axes_F = torch.arange(3).repeat_interleave(sizes)
        if tower.rope_interleaved:
            axes_F = torch.zeros_like(axes_F)
            for axis in (1, 2):
                axes_F[axis : 3 * tower.rope_sections[axis] : 3] = axis
        self.inv_freq, self._axes_F = frequencies_F, axes_F.to(frequencies_F.device)

    def forward(self, position_ids: Tensor, mrope_section: Sequence[int], cp_group: object = None) -> Tensor:
        """Return the angles [W, 1, 1, 2F] of positions [3, 1, W]. Megatron takes this rank's from them."""
        angles_WF = position_ids[:, 0].float()[self._axes_F].T * self.inv_freq
        return torch.cat([angles_WF, angles_WF], -1)[:, None, None]


@dataclass
class _DeepstackParams(PackedSeqParams):
    """Megatron's packing parameters, with the deepstack features that the first layers add to their outputs.

    These parameters also reach layers that Megatron recomputes. `rows`: int64, rows of this tensor rank's hidden
    states; `features`: for each of these layers, [number of rows, H].
    """

    rows: Tensor | None = None
    features: tuple[Tensor, ...] = ()


class _Context(FunctionCtx):
    """Autograd's context with the tensors that `_LateGradient` keeps."""

    leaves: tuple[Tensor, ...]


class _LateGradient(torch.autograd.Function):
    """Identity on its first argument. Its backward pass runs after `leaves` have gradients; `features` receive these.

    Recomputed layers run separate backward passes, which must end at leaves: the first of these passes would free the
    tower's graph, which all features share.
    """

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, leaves: tuple[Tensor, ...], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, *(leaf.grad for leaf in ctx.leaves)


class VisionGPTModel(GPTModel):
    """A GPTModel chunk of a vision-language model; on the first stage it has the tower as `visual`."""

    def __init__(self, info: ModelInfo, tower: VisionTower, device: torch.device, **arguments: object) -> None:
        """`arguments`: passed to GPTModel."""
        super().__init__(**arguments, position_embedding_type="mrope", scatter_embedding_sequence_parallel=False)
        self.tower = tower
        frequencies_F = inverse_frequencies(info.head_dim, info.rope_theta, info.rope_scaling)
        self.rotary_pos_emb = MultimodalRope(frequencies_F.to(device), tower)
        if not self.pre_process:
            return
        if len(self.decoder.layers) < len(tower.deepstack):
            raise ValueError(
                f"the first {len(tower.deepstack)} layers take image features (deepstack), and the first pipeline "
                f"stage has {len(self.decoder.layers)}; use fewer stages"
            )
        self.visual = _build_tower(info, self.config, device)
        # Outputs of the tower's frozen part by image. Whoever provides the images clears it after each step.
        self.feature_cache: dict[ImageKey, tuple[Tensor, ...]] = {}
        for index in range(len(tower.deepstack)):
            self.decoder.layers[index].register_forward_hook(_adds_features(index), with_kwargs=True)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        images: ImageBatch | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
        **options: object,
    ) -> Tensor:
        """Return what GPTModel returns. `position_ids`: int64 [3, 1, W]; `images` matter on the first stage only."""
        hidden_T1H = None
        if self.pre_process:
            hidden_T1H = self.embedding(input_ids=input_ids, position_ids=None)
            if images is not None:
                hidden_T1H, packed_seq_params = self._with_images(hidden_T1H, images, packed_seq_params)
            elif self.training and torch.is_grad_enabled() and self.trains_vision:
                hidden_T1H = hidden_T1H + self._zero()
            if self.config.sequence_parallel:
                hidden_T1H = mappings.scatter_to_sequence_parallel_region(hidden_T1H)
                if padding_mask is not None:  # Megatron only does this if it embeds the tokens
                    padding_mask = mappings.scatter_to_sequence_parallel_region(padding_mask.T.contiguous()).T
        return super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input=hidden_T1H,
            packed_seq_params=packed_seq_params,
            padding_mask=padding_mask,
            **options,
        )

    @property
    def trains_vision(self) -> bool:
        """True if any part of the tower is trained. Only the first stage's chunk has a tower."""
        return any(parameter.requires_grad for parameter in self.visual.parameters())

    def _with_images(
        self, hidden_T1H: Tensor, images: ImageBatch, packing: PackedSeqParams | None
    ) -> tuple[Tensor, PackedSeqParams | None]:
        """Return the hidden states with image features inserted, and the packing with deepstack's features."""
        features_MH, *deeper = self._cached_features(images)
        inserted_I1H = features_MH.index_select(0, images.features_I)[:, None].to(hidden_T1H.dtype)
        hidden_T1H = hidden_T1H.index_copy(0, images.rows_I, inserted_I1H)
        if not deeper:
            return hidden_T1H, packing
        rows_I, features_I = images.rows_I, images.features_I
        if self.config.sequence_parallel:
            # Each tensor rank adds the features of its rows; their gradients are summed.
            size = hidden_T1H.shape[0] // parallel_state.get_tensor_model_parallel_world_size()
            rows_I = rows_I - parallel_state.get_tensor_model_parallel_rank() * size
            own = (rows_I >= 0) & (rows_I < size)
            rows_I, features_I = rows_I[own], features_I[own]
            deeper = [mappings.copy_to_tensor_model_parallel_region(each_MH) for each_MH in deeper]
        added = tuple(each_MH.index_select(0, features_I) for each_MH in deeper)
        if any(each.requires_grad for each in added):
            leaves = tuple(each.detach().requires_grad_() for each in added)
            hidden_T1H, added = _LateGradient.apply(hidden_T1H, leaves, *added), leaves
        return hidden_T1H, _DeepstackParams(**vars(packing or PackedSeqParams()), rows=rows_I, features=added)

    def _cached_features(self, images: ImageBatch) -> list[Tensor]:
        """Return the image features [M, H], then those of each deepstack layer. The tower sees only uncached images.

        If more of the tower than its projectors is trained, nothing is cached.
        """
        if any(p.requires_grad for name, p in self.visual.named_parameters() if not trains(TOWER + name, "projector")):
            return self._features(images.read(range(len(images.keys))), images.grids_N3)
        found = {key: self.feature_cache[key] for key in images.keys if key in self.feature_cache}
        if missing := [number for number, key in enumerate(images.keys) if key not in found]:
            grids_N3 = images.grids_N3[missing]
            with torch.no_grad():
                made = (self._states if self.trains_vision else self._features)(images.read(missing), grids_N3)
            sizes = (grids_N3.prod(-1) // self.tower.merge**2).tolist()
            parts = zip(*(each.split(sizes) for each in made), strict=True)
            new = dict(zip([images.keys[number] for number in missing], parts, strict=True))
            held = [part for of_image in self.feature_cache.values() for part in of_image]
            if sum(part.nbytes for part in (*held, *made)) <= FEATURE_CACHE_BYTES:
                self.feature_cache |= new
            found |= new
        frozen = [torch.cat(parts) for parts in zip(*(found[key] for key in images.keys), strict=True)]
        if not self.trains_vision:
            return frozen
        return [project(each.flatten(0, 1)) for project, each in zip(self._projectors, frozen, strict=True)]

    @property
    def _projectors(self) -> list[torch.nn.Module]:
        """The modules that map the tower's states to image features, then those of each deepstack layer."""
        visual: Any = self.visual
        return [visual.merger, *getattr(visual, "deepstack_merger_list", ())]

    def _states(self, patches_PC: Tensor, grids_N3: Tensor) -> list[Tensor]:
        """Run the tower; return the input of each projector in the order of the features, [M, merge², tower's hidden].

        With windowed attention the tower reorders its rows and restores the order behind the projector. So projectors
        return row numbers here, and the tower's output is the permutation.
        """
        given: dict[torch.nn.Module, Tensor] = {}

        def number(projector: torch.nn.Module, inputs: tuple[Tensor, ...], output_MH: Tensor) -> Tensor:
            given[projector] = inputs[0].view(len(output_MH), self.tower.merge**2, -1)
            return torch.arange(len(output_MH), device=output_MH.device)[:, None]

        hooks = [projector.register_forward_hook(number) for projector in self._projectors]
        try:
            rows = self._features(patches_PC, grids_N3)
        finally:
            for hook in hooks:
                hook.remove()
        return [given[projector][rows_M1[:, 0]] for projector, rows_M1 in zip(self._projectors, rows, strict=True)]

    def _features(self, patches_PC: Tensor, grids_N3: Tensor) -> list[Tensor]:
        """Run the tower; return the image features [M, H], then those of each deepstack layer."""
        tower, device = self.tower, grids_N3.device
        pixels_PCX = patches_PC.to(device, non_blocking=True).float().view(len(patches_PC), tower.channels, -1)
        mean, std = (torch.tensor(each, device=device)[:, None] for each in (tower.mean, tower.std))
        pixels_PCX = (pixels_PCX / 255 - mean) / std
        out = self.visual(pixels_PCX.flatten(1).to(self.config.params_dtype), grid_thw=grids_N3)
        return [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]

    def _zero(self) -> Tensor:
        """Return a 0 that depends on all trained parameters of the tower, computed from a blank image.

        DDP waits for the gradient of every parameter, so a micro-batch without images must produce the tower's too.
        """
        count, device = self.tower.merge**2, platforms.current().device
        blank_PC = torch.zeros(count, self.tower.patch_size, dtype=torch.uint8)
        grid_13 = torch.tensor([[1, self.tower.merge, self.tower.merge]], device=device)
        return torch.stack([each_MH.sum() for each_MH in self._features(blank_PC, grid_13)]).sum() * 0


def freeze_vision(chunks: Sequence[torch.nn.Module], trained: Trained) -> None:
    """Freeze all parts of the tower but `trained`. Call it on bare chunks, before DDP wraps them.

    A trained tower is always recomputed: with four patches per token its activations would outweigh the language
    model's.
    """
    for chunk in chunks:
        if not isinstance(chunk, VisionGPTModel) or not chunk.pre_process:
            continue
        for name, parameter in chunk.visual.named_parameters():
            parameter.requires_grad_(trains(TOWER + name, trained))
            if platforms.current().is_cuda:
                # Kernels with a varying order of additions let the tensor ranks' copies drift apart.
                parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        if trained == "all":
            chunk.visual.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


def _build_tower(info: ModelInfo, config: TransformerConfig, device: torch.device) -> torch.nn.Module:
    """Build Hugging Face's module, with equal random weights on every rank."""
    from transformers import CONFIG_MAPPING, AutoModel

    vision = CONFIG_MAPPING[info.family].sub_configs["vision_config"](**info.raw["vision_config"])
    state = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with state, device if device.type == "cuda" else nullcontext():
        torch.manual_seed(0)
        tower: torch.nn.Module = AutoModel.from_config(vision, dtype=config.params_dtype, attn_implementation="sdpa")
    return tower


def _adds_features(index: int) -> Callable[..., Any]:
    """Return a hook that adds features `index` of deepstack to a layer's output."""

    def add(layer: torch.nn.Module, inputs: object, options: dict[str, Any], output: tuple[Any, ...]) -> object:
        packing, (hidden_T1H, *rest) = options["packed_seq_params"], output
        if not isinstance(packing, _DeepstackParams) or packing.rows is None:
            return output
        added_I1H = packing.features[index][:, None].to(hidden_T1H.dtype)
        return (hidden_T1H.index_add(0, packing.rows, added_I1H), *rest)

    return add
