"""Shared by the vision-language families: reading the language model's config, and the tower's rules.

The tower is Hugging Face's module, so its parameters keep their Hugging Face names in Megatron.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from megarl.models.architecture.architecture import ModelInfo, VisionTower
from megarl.models.architecture.mapping import Rule, Source

TOWER = "visual."
PROJECTOR = (f"{TOWER}merger.", f"{TOWER}deepstack_merger_list.")  # map the tower's features to the hidden size
Trained: TypeAlias = Literal["none", "projector", "all"]  # what of a tower is
FEATURE_CACHE_BYTES = 512 << 20  # of a frozen tower's outputs for the images of a step, on each rank with a tower


def language_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's config in the form of a text model's; `vision_config` stays.

    transformers 5 writes it under `text_config`; the published Qwen2.5-VL has it at the top level. Raises ValueError if
    the two disagree on tied embeddings.
    """
    text = raw.get("text_config") or {}
    tied = {bool(part["tie_word_embeddings"]) for part in (raw, text) if part.get("tie_word_embeddings") is not None}
    if len(tied) > 1:
        raise ValueError("tie_word_embeddings differs between the top level and text_config; make them equal")
    kept = {key: value for key, value in raw.items() if key != "text_config"}
    merged = {**kept, **text, "tie_word_embeddings": True in tied, "architectures": raw.get("architectures")}
    for key in ("rope_parameters", "rope_scaling"):
        if merged.get(key):
            kinds = {merged[key].get(name) for name in ("type", "rope_type")} - {None, "default", "mrope"}
            if kinds:
                raise ValueError(f"RoPE scaling {kinds.pop()!r} is not supported in vision-language models")
            merged[key] = {**merged[key], "type": None, "rope_type": "default"}
    return merged


def read_tower(
    raw: Mapping[str, Any],
    defaults: Mapping[str, Any],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    *,
    interleaved: bool = False,
) -> VisionTower:
    """Read `vision_config`. `defaults`: values of keys that it omits; the others are fields of VisionTower.

    Raises ValueError if the tower's features and the language model's hidden states differ in size.
    """
    vision = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, **defaults, **raw["vision_config"]}
    out = int(vision["out_hidden_size"])
    if out != int(raw["hidden_size"]):
        raise ValueError(f"vision_config.out_hidden_size={out} differs from hidden_size={raw['hidden_size']}")
    rope = raw.get("rope_parameters") or raw["rope_scaling"]
    return VisionTower(
        layers=int(vision["depth"]),
        hidden=int(vision["hidden_size"]),
        ffn=int(vision["intermediate_size"]),
        heads=int(vision["num_heads"]),
        patch=int(vision["patch_size"]),
        frames=int(vision["temporal_patch_size"]),
        merge=int(vision["spatial_merge_size"]),
        channels=int(vision["in_channels"]),
        rope_sections=tuple(int(size) for size in rope["mrope_section"]),
        places=int(vision.get("num_position_embeddings", 0)),
        deepstack=tuple(vision.get("deepstack_visual_indexes", ())),
        mean=mean,
        std=std,
        rope_interleaved=interleaved,
    )


def tower_rules(hf: str, shapes: Mapping[str, str], info: ModelInfo) -> tuple[Rule, ...]:
    """Return the rules of a tower. Each tensor rank of the first stage holds all parameters whole.

    `shapes`: the shape of each parameter as in `Source`, by its name in the tower; `{layer}` stands for each layer and
    `{deep}` for each feature of deepstack. `hf`: the prefix of the tower's names in the files.
    """
    tower = info.vision
    if tower is None:
        return ()

    def names() -> Iterator[tuple[str, str]]:
        for name, shape in shapes.items():
            count = tower.layers if "{layer}" in name else len(tower.deepstack) if "{deep}" in name else 1
            yield from ((name.format(layer=number, deep=number), shape) for number in range(count))

    return tuple(Rule(TOWER + name, (Source(hf + name, shape),)) for name, shape in names())


def trains(name: str, trained: Trained) -> bool:
    """Return whether a parameter of a tower, by Megatron's name, is trained."""
    return trained == "all" or (trained == "projector" and name.startswith(PROJECTOR))


def frozen_tensors(rules: Iterable[Rule], trained: Trained) -> tuple[str, ...]:
    """Return the names in the files of what is not trained of a tower, by its rules."""
    fixed = (rule for rule in rules if not trains(rule.megatron, trained))
    return tuple(source.name for rule in fixed for source in rule.sources)


def under(prefix: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules of a text model for files with `prefix` in place of `model.`."""

    def moved(name: str) -> str:
        return prefix + name.removeprefix("model.") if name.startswith("model.") else name

    return tuple(
        replace(rule, sources=tuple(replace(each, name=moved(each.name)) for each in rule.sources)) for rule in rules
    )
