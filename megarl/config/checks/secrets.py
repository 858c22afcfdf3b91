"""Finds references to environment variables in a config, and checks that the variables are set."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megarl.common.errors import ConfigError
from megarl.common.trust.secret_references import literal_secrets, missing, references
from megarl.config.checks.agent import tool_lists
from megarl.config.schema import Config
from megarl.config.schema.job import LaunchConfig


def referenced_variables(config: Config) -> dict[str, str]:
    """Return, by variable name, the first config key that refers to each environment variable."""
    found: dict[str, str] = {}
    for key, values in _passed_on(config):
        for place, name in references(values, key):
            found.setdefault(name, place)
    return found


def secret_problems(config: Config, *, here: bool) -> Iterator[str]:
    """Yield a problem for each secret in the config itself, and for each variable that is not set.

    `here`: the run is on this machine, or inherits this process's variables.
    """
    given = given_variables(config.launch)
    for name, place in referenced_variables(config).items():
        if here and name not in given:
            yield missing(place, name)
    for key, values in _passed_on(config):
        for place in literal_secrets(values, key):
            yield (
                f"{place}: its name says that it is a secret, which would be written to config.yaml, checkpoints and "
                "trackers; put it into an environment variable and write {env: NAME}"
            )


def given_variables(launch: LaunchConfig) -> set[str]:
    """Return the names of the environment variables of a run's processes on this machine."""
    try:
        return {*os.environ, *user_environment(launch.runtime_env)}
    except ConfigError:
        return set(os.environ)  # a launch reports what is wrong with the file


def _passed_on(config: Config) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (key, fields) of everything passed to a user's function or a library with references replaced."""
    yield "reward.kwargs", config.reward.kwargs
    yield "agent.kwargs", config.agent.kwargs
    for key, tools in tool_lists(config).items():
        for index, tool in enumerate(tools):
            yield f"{key}.{index}.kwargs", tool.kwargs
    for section, sets in (("data", config.data.sets), ("evaluation", config.evaluation.sets)):
        for index, each in enumerate(sets):
            yield f"{section}.sets.{index}.reward.kwargs", each.reward.kwargs or {}
    yield "data.curriculum.kwargs", config.data.curriculum.kwargs
    yield "rollout.engine_kwargs", config.rollout.engine_kwargs
    for index, teacher in enumerate(config.teachers):
        yield f"teachers.{index}.engine_kwargs", teacher.engine_kwargs


def user_environment(path: Path | None) -> dict[str, str]:
    """Return the `env_vars` of `launch.runtime_env`. Raises ConfigError, naming the file, if it holds anything else."""
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError([f"launch.runtime_env: {path} cannot be read: {error}"]) from None
    if not isinstance(content, dict) or set(content) - {"env_vars"}:
        raise ConfigError([
            f"launch.runtime_env: {path} may only have `env_vars`: code and packages come from the shared file system "
            f"on all nodes"
        ])  # fmt: skip
    variables = content.get("env_vars") or {}
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise ConfigError([f"launch.runtime_env: {path}: every value of env_vars must be a string; put it in quotes"])
    return {str(name): value for name, value in variables.items()}
