"""CPU-sized twins of the recipes: the recipe's own file with other sizes, so that its algorithm runs on two cores."""

import json
from pathlib import Path
from typing import Any

import yaml

from megarl.config.derived.staleness import pace_of
from megarl.config.loading.load import config_from_tree
from tests.support.checkout import ROOT
from tests.support.models.calling_model import teach_calls
from tests.support.models.tiny import LATENT, make_tiny_model
from tests.support.models.tiny_vision import make_tiny_vision, picture
from tests.support.trainer.configs import with_changes

_CONFIGS = sorted((ROOT / "examples/rl/configs").glob("*.yaml"))
RECIPES = {path.stem: path for path in _CONFIGS if not path.stem.endswith("_cpu")}

# Of a family: layers that the twin's stages divide as the recipe's do, and sizes that vLLM takes on a CPU.
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 5, **LATENT},  # a first stage of 4, a last one of 1
    "glm4_moe": {"num_hidden_layers": 3, "moe_intermediate_size": 64},
    "qwen3_5_moe": {"num_hidden_layers": 4, "moe_intermediate_size": 64},
}
STAGES = "Et|ttL"  # in the place of a recipe's own text
RANKS, GROUPS, SAMPLES, RESPONSE_TOKENS = 2, 4, 4, 12
CALLING_TOKENS = 96  # of a response that may call a tool: the call, its answer and what follows
EVAL_SAMPLES = 2  # per problem of a held-out set
# Keys that say how much hardware the recipe has. Without them a run takes what one machine has.
DROPPED = (
    "model.shape", "trainer.gpus_per_node", "trainer.devices", "trainer.device_memory_gib",
    "rollout.tensor_parallel", "rollout.gpus_per_node", "rollout.devices", "rollout.device_memory_gib",
)  # fmt: skip
PARALLEL_SIZES = ("tensor", "context", "pipeline", "expert", "expert_tensor")


def recipe(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(RECIPES[name].read_text())
    return tree


def twin(name: str, directory: Path) -> dict[str, Any]:
    """The recipe with a tiny model and few, short responses, whose model and data lie in `directory`.

    It takes as many steps as show the bound on staleness. The reward is one that a random model varies; with dynamic
    sampling it is equal within about half of the groups. A recipe with tools keeps its own: its twin's model calls them
    in about half of the samples.
    """
    whole = recipe(name)
    buffer = whole["algorithm"].get("overlong", {}).get("buffer_tokens", 0)
    sees = "images_field" in whole["data"]
    shipped = "even_sums_are_equal" if whole["admission"].get("refill") else "mean_byte" if sees else "digit_share"
    reward = whole["reward"]["function"] if whole.get("tools") else f"tests.support.rewards.reward_functions:{shipped}"
    max_tokens = CALLING_TOKENS if whole.get("tools") else RESPONSE_TOKENS
    heldout = directory / "heldout.jsonl"
    sizes = {size: min(ways, 2) for size, ways in _parallel_sizes(whole).items()}
    changes: dict[str, Any] = {
        "run__dir": str(directory / "run"),
        "run__steps": pace_of(config_from_tree(whole)).max_staleness + 3,
        "model__path": str(directory / "model"),
        "trainer__gpus": _ranks(sizes),
        "trainer__precision": "fp32",
        "trainer__optimizer__warmup_steps": 1,
        # Groups of equal rewards are dropped; what is left must be enough for every update of a step.
        "batch__groups": max(GROUPS, 2 * whole["trainer"].get("mini_batches", 1)),
        "batch__samples_per_group": SAMPLES,
        "sampling__max_tokens": max_tokens,
        "data__path": str(directory / "train.jsonl"),
        "data__max_prompt_tokens": 480 if sees else 160,  # its suffix alone has 240
        "reward__function": reward,
        "reward__workers": 1,
        "evaluation__sets": [_small_set(each, heldout) for each in whole["evaluation"]["sets"]],
        "rollout__replicas": 1,
        "rollout__max_num_seqs": 32,
        "queue__storage_units": 1,
        "timeouts": {"rpc_s": 60, "generate_s": 180, "weight_sync_s": 120, "save_s": 120, "engine_start_s": 900},
        **{f"trainer__parallel__{size}": ways for size, ways in sizes.items()},
    }
    if "pipeline_layout" in whole["trainer"]["parallel"]:
        changes["trainer__parallel__pipeline_layout"] = STAGES
    if "group_deadline_s" in whole["rollout"]:
        changes["rollout__group_deadline_s"] = 120.0  # so long that it comes for nothing that works
    if buffer:
        changes["algorithm__overlong__buffer_tokens"] = max(1, buffer * max_tokens // whole["sampling"]["max_tokens"])
    small = with_changes(whole, changes)
    for key in DROPPED:
        section, _, field = key.partition(".")
        small[section].pop(field, None)
    return small


def write_model_and_data(name: str, directory: Path) -> None:
    """A tiny seeded model of the recipe's family and additions in its data's format, where `twin` expects them."""
    shape = json.loads((ROOT / recipe(name)["model"]["shape"] / "config.json").read_text())
    sees = "vision_config" in shape
    family = shape["model_type"]
    (make_tiny_vision if sees else make_tiny_model)(directory / "model", family=family, **SIZES.get(family, {}))
    problems = [(f"What is {a} + {b}?", str(a + b)) for a in range(3, 11) for b in range(2, 9)]
    if recipe(name).get("tools"):
        suffix = recipe(name)["data"].get("suffix", "")
        teach_calls(directory / "model", [problem + suffix for problem, _ in problems])
    for file, part in (("train", problems[8:]), ("heldout", problems[:8])):
        kind = recipe(name)["data"].get("format", "auto")
        if file == "train" and "dapo" in str(recipe(name)["data"].get("path")):
            kind = "verl"  # as DAPO-Math-17k is published
        rows = [_row(kind, *problem) for problem in part]
        if sees:
            for number, row in enumerate(rows):
                (directory / f"{file}{number}.png").write_bytes(picture(90, 60, number))
                row |= {"images": [f"{file}{number}.png"], "problem": f"<image>{row['problem']}"}
        (directory / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def differing_keys(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Dotted keys whose values differ, or that only one of the trees has."""
    first, second = _leaves(one), _leaves(other)
    missing = object()
    return {key for key in first.keys() | second.keys() if first.get(key, missing) != second.get(key, missing)}


def _small_set(whole: dict[str, Any], path: Path) -> dict[str, Any]:
    """A held-out set with fewer responses per problem, if the recipe says how many, and still more than one."""
    sampling = whole.get("sampling", {})
    fewer = (
        {"sampling": {**sampling, "samples": min(sampling["samples"], EVAL_SAMPLES)}} if "samples" in sampling else {}
    )
    return {**whole, "path": str(path), **fewer}


def _parallel_sizes(tree: dict[str, Any]) -> dict[str, int]:
    return {size: ways for size, ways in tree["trainer"]["parallel"].items() if size in PARALLEL_SIZES}


def _ranks(sizes: dict[str, int]) -> int:
    """The fewest ranks, at least two, that hold every kind of parallelism of the twin."""
    tensor, pipeline = (sizes.get(size, 1) for size in ("tensor", "pipeline"))
    experts = sizes.get("expert", 1) * sizes.get("expert_tensor", tensor)
    return max(RANKS, pipeline * max(tensor * sizes.get("context", 1), experts))


def _row(kind: str, problem: str, answer: str) -> dict[str, Any]:
    if kind == "verl":
        prompt = [{"role": "user", "content": problem}]
        return {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": answer, "style": "rule"}}
    if kind == "gsm8k":
        return {"question": problem, "answer": f"It is a sum.\n#### {answer}"}
    return {"problem": problem, "answer": answer}


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
