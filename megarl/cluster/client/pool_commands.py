"""Changes of the pool of a live run: `megarl pool` calls the controller through Ray, from a host of the run."""

import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from megarl.cluster.client.connection import call_once, connect_ray
from megarl.cluster.pool.actors import CONTROLLER
from megarl.cluster.pool.network import own_address
from megarl.cluster.pool.pool_process import REBUILDING, SPEC_FILE, SupervisorHandle, SupervisorSpec, read_state_again
from megarl.cluster.pool.ray_head import LOOPBACK
from megarl.common.errors import ConfigError, RolloutError, clear_text
from megarl.common.process.processes import ProcessId, is_alive
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.config.schema import Config
from megarl.config.schema.job import TimeoutsConfig

MARGIN_S = 30.0  # how much earlier a command's own bounds end than the wait for its answer

Action = Literal["list", "drain", "undrain", "remove", "add"]


def ask_pool(
    run_dir: Path, action: Action, number: int = 0, *, timeout_s: float | None = None, say: Callable[[str], object]
) -> Any:  # noqa: ANN401  # a text, or for `list` the replicas and how many are missing
    """Send a command to the controller of a live run; return its answer.

    `number`: the replica, or with `add` how many engines. `timeout_s`: the longest wait; None: what the action may take
    by the run's own time-outs. `say` gets one line with what is waited for.

    Raises ConfigError if there is no live run, if the command fails, or if no answer comes in time. On a host that is
    not the run's it names one that is.
    """
    handle = _living(run_dir)
    config = Config.model_validate_json(SupervisorSpec.load(run_dir / "logs" / SPEC_FILE).config_json)
    bound_s = timeout_s or _bound_s(config.timeouts, config.rollout.report_interval_s, action)
    what = f"the rollout controller of {run_dir} to {action}"
    say(f"waiting up to {bound_s:.0f} s for {what}")
    if config.ray.address is None:
        os.environ[NODE_ADDRESS_VARIABLE] = _address_here(handle, config.launch.interface)
    try:
        connect_ray(handle, config.timeouts.ray_start_s)
    except OSError as error:
        raise ConfigError([f"the pool cannot be reached: {error}; run it as the user of the run"]) from error
    except RolloutError as error:
        raise ConfigError([f"{error}; run the command on a host of the run, such as {handle.host}"]) from error
    import ray

    method, arguments = ("list_replicas", ()) if action == "list" else ("change_pool", (action, number))
    try:
        controller = ray.get_actor(CONTROLLER, namespace=handle.namespace)
        answer = call_once(
            controller, method, arguments, {}, timeout_s=bound_s, reach_s=config.timeouts.rpc_s,
            check=handle.check_parts,
        )  # fmt: skip
    except ray.exceptions.GetTimeoutError:
        late = f"waited {bound_s:.0f} s for {what}, which continues: `megarl pool list` shows when it is done"
        raise ConfigError([late]) from None
    except (RolloutError, ray.exceptions.RayError, ValueError) as error:
        cause = getattr(error, "cause", None)
        raise ConfigError([clear_text(cause if isinstance(cause, BaseException) else error)]) from None
    finally:
        ray.shutdown()
    return answer if action != "list" else {"replicas": [asdict(each) for each in answer[0]], "missing": answer[1]}


def _living(run_dir: Path) -> SupervisorHandle:
    """Return the handle of a live pool. Raises ConfigError if there is none."""
    state = read_state_again(run_dir)
    if state is None:
        raise ConfigError([f"{run_dir} has no supervisor.json: no run has started there, or it is not a run directory"])
    if state["host"] == platform.node() and not is_alive(ProcessId(**state["process"])):
        raise ConfigError([f"no run lives in {run_dir}: its supervisor (pid {state['process']['pid']}) has ended"])
    if state["state"] == "starting":
        raise ConfigError([f"the engines of {run_dir} are still being started: try again when they are up"])
    if state["state"] == REBUILDING:
        raise ConfigError([f"the rollout controller of {run_dir} is restarting: try again in a minute"])
    if state["state"] != "ready":
        reason = f": {state['error']}" if state.get("error") else ""
        raise ConfigError([f"no run lives in {run_dir}: its pool is {state['state']}{reason}"])
    return SupervisorHandle.of(run_dir, state)


def _address_here(handle: SupervisorHandle, interface: str | None) -> str:
    """Return the address at which Ray listens on this host. Raises ConfigError if the run has one host, another one."""
    head = handle.address.rpartition(":")[0]
    if handle.host == platform.node():
        return head
    if head == LOOPBACK:
        raise ConfigError(
            [f"this host is {platform.node()}: run the command on {handle.host}, the only host of the run"]
        )
    return own_address([head], interface)


def _bound_s(timeouts: TimeoutsConfig, report_interval_s: float, action: Action) -> float:
    """Return how long an action may take: the bounds of what it waits for, plus a margin."""
    parts = {
        "list": timeouts.rpc_s,
        "undrain": timeouts.rpc_s,
        "add": timeouts.node_s + timeouts.engine_start_s,
    }
    return parts.get(action, report_interval_s + 2 * timeouts.rpc_s) + MARGIN_S
