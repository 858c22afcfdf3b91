"""The config sections of agents: the loop that makes a trajectory of a prompt, its bounds, and the tools."""

from typing import Literal

from pydantic import Field

from megarl.common.options import Passed, Section

SINGLE_TURN, TOOL_AGENT, HARNESS = "single_turn", "tool_agent", "harness"
VERIFIERS = "megarl.environments.verifiers_loop:Verifiers"  # shipped too, but named by its import path
SHIPPED_LOOPS = (SINGLE_TURN, TOOL_AGENT)  # apart from tools, these only run megarl's code
TOOL_AGENT_TURNS = 8  # the default
LOOP_TURNS = 1000  # the default of other loops and of a harness: far more than any that ends makes
ACT_TIMEOUT_S = 1500.0  # of `act`, and of a run of a verifiers environment
SHIPPED_TOOLS = ("python", "http")


class ToolConfig(Section):
    """A tool that the model may call."""

    kind: str
    """`python`, `http`, or the import path `package.module:function` of a function with typed arguments, or
    `package.module:Class` of a tool; both run in processes of their own."""
    name: str | None = None
    """The name by which the model calls it; default: that of the kind or of the function."""
    kwargs: Passed = Field(default_factory=dict, description="Arguments of the tool; `{env: NAME}` for a secret.")
    in_worker: bool = False
    """For a class: keep its object in the process of the loops. A call costs some tenths of a millisecond less, but a
    blocking call delays all loops there, and a hanging one cannot be killed."""

    @property
    def called(self) -> str:
        """The name by which the model calls it."""
        return self.name or self.kind.rpartition(":")[2]


class AgentConfig(Section):
    """The agent loop of all data sets, and the bounds of one trajectory (docs/rollout.md)."""

    loop: str = Field(
        SINGLE_TURN,
        description=f"`{SINGLE_TURN}`: one response. `{TOOL_AGENT}`: the model may call `tools`. `{HARNESS}`: "
        "`act` talks with the model through the gateway. Or the import path `package.module:Class` of a loop.",
    )
    kwargs: Passed = Field(default_factory=dict)
    """Arguments of your own loop's class, or further arguments of `act`."""
    act: str | None = Field(
        None,
        description="Import path `package.module:function` of the `async def act(base_url, token, session, row)` of "
        f"`loop: {HARNESS}`: it acts for one sample through the gateway, which needs `gateway.enabled`.",
    )
    act_timeout_s: float = Field(ACT_TIMEOUT_S, gt=0)
    """Seconds of one call of `act`; a sample that takes longer has failed. Below `timeouts.generate_s`, after which a
    trainer that waits for the sample ends the run."""
    max_turns: int | None = Field(
        None,
        ge=1,
        description=f"Turns of the model, of which `{TOOL_AGENT}`'s last one may call no tool; in other loops the "
        f"requests of a trajectory. null: {TOOL_AGENT_TURNS} for `{TOOL_AGENT}`, else {LOOP_TURNS}.",
    )
    max_tool_calls: int = Field(32, ge=0, description="Calls of tools; further ones are answered with an error.")
    max_calls_per_turn: int | None = Field(
        None,
        ge=1,
        description=f"The most calls of one turn that `{TOOL_AGENT}` reads; further ones get no answer. null: all.",
    )
    max_malformed_calls: int = Field(4, ge=0)
    """Calls that cannot be read and are answered with an error; the next one ends the loop."""
    tool_timeout_s: float = Field(30.0, gt=0, description="Seconds of one call.")
    max_tool_seconds: float = Field(300.0, gt=0)
    """Seconds of all calls; further ones are answered with an error."""
    max_tool_output_chars: int = Field(8192, ge=64)
    """Characters of one answer of a tool. A longer one is cut, with a note in place of the cut part."""
    tool_output_cut: Literal["beginning", "middle", "end"] = "middle"
    """The part of a longer answer that is left out."""
    tool_output_note: str = Field("\n[... {left_out} characters left out ...]\n", max_length=1000)
    """The note in place of the cut part; `{left_out}` becomes its number of characters."""
    on_overflow: Literal["truncate", "fail"] = Field(
        "truncate",
        description="When a tool's answer does not fit into `sampling.max_tokens`, which bounds all tokens after the "
        "prompt: end the trajectory before it, as truncated (`sampling.truncated`), or fail it. Also when `act` of "
        f"`loop: {HARNESS}` fails because the gateway refused a request at a bound.",
    )
    tool_format: Literal["template", "hermes"] = "template"
    """How the model writes a call, also through the gateway. template: as its chat template does (JSON, a name and
    JSON, or tags with an element per argument). hermes: `<tool_call>` with JSON, as Hermes and Qwen do."""
