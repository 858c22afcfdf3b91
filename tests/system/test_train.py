"""Whole runs, as a user starts them: torchrun, real Megatron-Core, real vLLM, real Ray, real TransferQueue."""

import hashlib
import json
import math
import re
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.chat.tokenize import PromptEncoder
from megarl.common.trust.run_secret import run_secret
from megarl.config.schema.data import DataConfig
from megarl.data.dataset import load_prompts
from megarl.queue.dump import DumpedBatch, read_batch
from megarl.rollout.agents.batch_stats import PARTS
from megarl.telemetry.trace.files import read_events
from tests.support.attacks.open_sockets import check_on_loopback
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.repository.needs import NODE, left_out
from tests.support.rewards.reward_functions import digit_share
from tests.support.runs.fault_table import moments
from tests.support.runs.run import ON_POLICY_MAX, ON_POLICY_MEAN, Run, start, step_records, tiny_config, train
from tests.support.runs.whole_runs import (
    actors,
    check_every_group_once,
    killed_after,
    metric_steps,
    start_run,
    wait_for,
)
from tests.support.telemetry import perfetto

pytestmark = pytest.mark.engine

ENDS = ("trained", "filtered", "dropped_stale", "failed")


def check_finished(run: Run, steps: int, samples: int) -> None:
    """Check what every good run must show: exact counters, log-probs that agree on every token, a complete summary."""
    assert run.code == 0, run.output[-4000:]
    summary = run.summary
    assert summary["exit"] == "finished" and summary["steps"] == steps
    assert len(run.metrics) == steps
    for record in run.metrics:
        assert record["mismatch/logprob_abs_diff_mean"] <= ON_POLICY_MEAN, record["step"]
        assert record["mismatch/logprob_abs_diff_max"] <= ON_POLICY_MAX, record["step"]
        # Every response token was compared, first and EOS included.
        assert record["mismatch/tokens"] == record["batch/loss_tokens"] > 0
        assert record["groups/admitted"] == sum(record[f"groups/{end}"] for end in ENDS)
        assert record["rollout/version_lag_max"] == 0
    assert summary["trained_samples"] == samples
    assert {"greedy", "sampled", "n"} <= set(summary["eval_before"]) and summary["eval_after"]["n"] == 8


@pytest.mark.slow
def test_ranks_that_share_sequences_agree_with_the_engine_in_every_step(tmp_path: Path) -> None:
    """CP2: reference and old log-probs are passes of their own; a save is resumed without CP."""
    config = tiny_config(tmp_path, steps=3)
    config["trainer"]["parallel"] = {"context": 2}
    config["trainer"]["optimizer"]["lr"] = 1e-2
    config["algorithm"] = {"old_logprobs": "trainer", "kl": {"coef": 0.01}}
    config["checkpoint"] = {"every": 2}
    run = train(config)
    check_finished(run, steps=3, samples=3 * 16)
    assert all(record["policy/grad_norm"] > 0 and "policy/kl_ref" in record for record in run.metrics)
    config["run"]["steps"], config["trainer"]["parallel"] = 4, {}
    resumed = train(config)
    assert resumed.code == 0 and "the layout differs" in resumed.output, resumed.output[-4000:]
    assert resumed.metrics[-1]["mismatch/logprob_abs_diff_max"] <= ON_POLICY_MAX
    assert_nothing_left(run.directory)


def test_tensor_parallel_with_tied_embeddings(tmp_path: Path) -> None:
    """TP2, tied head: the engine's log-probs stay the trainer's after every sync, which a head left behind breaks."""
    config = tiny_config(tmp_path, steps=3, tie_word_embeddings=True)
    config["trainer"]["parallel"] = {"tensor": 2}
    config["trainer"]["optimizer"]["lr"] = 1e-2
    config["algorithm"] = {"old_logprobs": "trainer"}
    config["checkpoint"] = {"every": 2}
    run = train(config)
    check_finished(run, steps=3, samples=3 * 16)
    # Of engine and trainer; if they were the engine's own on both sides, they would be equal.
    assert all(record["mismatch/logprob_abs_diff_max"] > 0 for record in run.metrics)
    assert run.summary["logprob_abs_diff"]["last"]["max"] <= ON_POLICY_MAX
    check_exported_policy(run)
    check_trace(run)
    assert_nothing_left(run.directory)


# What every process of such a run records; what only faults, tools and resumes bring is in other tests.
IN_A_TRACE = {
    "trainer rank 0": {
        "step", "generate", "logprobs", "update", "sync", "eval", "mini_batch",
        "publication", "sync_stage", "sync_pause", "sync_start", "sync_update", "sync_finish", "sync_resume",
        "evaluation", "checkpoint",
    },
    "trainer rank 1": {"step", "generate", "logprobs", "update", "sync", "mini_batch"},
    "controller": {"trajectory", "turn", "reward", "batch_taken"},
    "replica 0": {"busy", "paused", "load_weights", "join_group"},
}  # fmt: skip


def check_trace(run: Run) -> None:
    """`megarl trace` gives a trace of all processes, with what each of them has done, and where samples' time went."""
    out = run.directory / "trace.json"
    command = [sys.executable, "-m", "megarl", "trace", str(run.directory), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    events = json.loads(out.read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    shown: dict[str, set[str]] = {name: set() for name in names.values()}
    for each in events:
        if each["ph"] in "Xi":
            shown[names[each["pid"]]].add(each["name"].split(" ")[0])
    assert {name: IN_A_TRACE[name] - shown[name] for name in IN_A_TRACE} == {name: set() for name in IN_A_TRACE}
    # A phase may have several parts, of which short ones are not shown: after a slow moment there may be two.
    updates = {(each["pid"], each["args"]["step"]) for each in events if each["name"] == "update"}
    made = [(each["pid"], each["args"]["step"]) for each in events if each["name"] == "mini_batch"]
    assert sorted(made) == sorted(updates) and [step for _, step in sorted(made)] == [1, 2, 3, 1, 2, 3]
    check_in_perfetto(out, sum(each["ph"] in "Xi" for each in events))
    steps = {each["step"]: each for each in run.metrics}
    seconds: Counter[tuple[str, int | None]] = Counter()  # of all parts of the phase
    for event in read_events(run.directory, {"update"}):
        seconds[event.process, event.step] += event.seconds
    for (_, step), shown_s in seconds.items():
        assert shown_s == pytest.approx(steps[step]["time/update"], rel=0.5, abs=0.25)
    slow = list(read_events(run.directory, {"slow_trajectory"}))
    assert [each.step for each in slow] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    for event in slow:
        parts = {name: float(event.args[f"{name}_s"]) for name in PARTS}
        assert sum(parts.values()) == pytest.approx(event.seconds, abs=0.01)
        assert parts["decode"] > 0 < parts["prefill"] and parts["tool"] == 0
        assert parts[str(event.args["cause"])] == max(parts.values())


def check_in_perfetto(trace: Path, spans: int) -> None:
    """Perfetto's own engine finds no error in the trace, all its spans, and each update inside a step of its rank.

    An update has two spans, of which a short one is left out. Where Perfetto is missing the rest of the run is checked
    all the same.
    """
    if left_out(NODE, perfetto.missing()):
        return
    counted, updates = perfetto.ask_perfetto(
        trace,
        "select count(*) as count from slice where dur >= 0 and category != 'flow'",
        "select distinct process.name as process, parent.name as parent, "
        "extract_arg(child.arg_set_id, 'args.step') as step from slice child "
        "join slice parent on child.parent_id = parent.id join thread_track on child.track_id = "
        "thread_track.id join thread using (utid) join process using (upid) where child.name = 'update' "
        "order by process, step",
    )
    assert counted == [{"count": spans}]
    assert updates == [
        {"process": f"trainer rank {rank}", "parent": "step", "step": step} for rank in range(2) for step in (1, 2, 3)
    ]


def check_exported_policy(run: Run) -> None:
    """Plain transformers loads RUN_DIR/hf and gives the greedy answers of the last evaluation."""
    model = AutoModelForCausalLM.from_pretrained(run.directory / "hf", dtype=torch.float32)
    tokenizer, path = AutoTokenizer.from_pretrained(run.directory / "hf"), run.directory.parent / "heldout.jsonl"
    encoder, prompts = PromptEncoder(tokenizer), load_prompts(path, DataConfig(path=path))
    lines = (run.directory / "eval_after.jsonl").read_text().splitlines()
    greedy = [record for record in map(json.loads, lines) if record["mode"] == "greedy"]
    assert len(greedy) == 8
    for record in greedy:
        prompt = torch.tensor([encoder.encode(prompts[record["index"]])])
        output = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
        assert tokenizer.decode(output, skip_special_tokens=True) == record["response"]


def test_pipeline_parallel_with_two_data_sets(tmp_path: Path) -> None:
    """PP2, two sets of T = 0.6 and 1.2, two updates per step, trainer's old log-probs, KL to a reference, dumps."""
    config = tiny_config(tmp_path, steps=2)
    config["trainer"] |= {"parallel": {"pipeline": 2}, "mini_batches": 2}
    config["sampling"]["temperature"] = 0.6
    config["data"] = {"sets": two_sets(tmp_path)}
    config["algorithm"] = {"old_logprobs": "trainer", "kl": {"coef": 0.01}}
    run = train(config, "telemetry.dump_batches=true")
    check_finished(run, steps=2, samples=2 * 16)
    assert all(record["policy/updates"] == 2 for record in run.metrics)
    assert len(list((run.directory / "batches").glob("*.parquet"))) == 2
    assert len((run.directory / "samples.jsonl").read_text().splitlines()) == 2 * 4
    check_data_sets(run)
    check_engine_logprobs(run, tmp_path / "model")
    check_replay(run, tmp_path / "model")


def two_sets(directory: Path) -> list[dict[str, Any]]:
    """Three of four groups are of `plain`; `other` has everything of its own that a set can have."""
    rows = [{"q": f"{a} + {b} = ?", "gold": a + b} for a in range(5) for b in range(4)]
    (directory / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = {
        "name": "other",
        "path": str(directory / "other.jsonl"),
        "weight": 0.5,
        "prompt_field": "q",
        "answer_field": "gold",
        "system_prompt": "You add.",
        "suffix": " Think.",
        "reward": {"function": "tests.support.rewards.reward_functions:scaled_digit_share", "kwargs": {"scale": -2.0}},
        "sampling": {"temperature": TEMPERATURES["other"], "max_tokens": 7},
    }
    return [{"name": "plain", "path": str(directory / "train.jsonl"), "weight": 1.5}, other]


TEMPERATURES = {"plain": 0.6, "other": 1.2}


def check_data_sets(run: Run) -> None:
    """Each set's groups have its share of every step, its prompt, its limit and its reward."""
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "hf")
    for record in run.metrics:
        batch = read_batch(run.directory / "batches", record["step"] - 1)
        assert (record["data/plain/groups"], record["data/other/groups"]) == (3, 1)
        for name, scale, limit in (("plain", 1.0, 12), ("other", -2.0, 7)):
            rows = [row for row in batch.trajectories if row.dataset == name]
            answers = [tokenizer.decode(row.response_ids, skip_special_tokens=True) for row in rows]
            rewards = [scale * digit_share(answer, "") for answer in answers]
            assert [row.reward for row in rows] == rewards
            assert record[f"data/{name}/reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
            assert max(len(row.response_ids) for row in rows) == limit
            asked = {"You add." in tokenizer.decode(row.prompt_ids) for row in rows}
            assert asked == {name == "other"}


def check_replay(run: Run, first_model: Path) -> None:
    """`megarl replay` of the recorded batches on one rank ends with the run's own policy."""
    command = [sys.executable, "-m", "megarl", "replay", "--run-dir", str(run.directory), "--export",
               "trainer.gpus=1", "trainer.parallel.pipeline=1"]  # fmt: skip
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, trained, replayed = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (first_model, run.directory / "hf", run.directory / "replay" / "hf")
    )
    for name, value in trained.items():
        assert (replayed[name] - value).norm() <= 1e-4 * (value - first[name]).norm(), name


def check_engine_logprobs(run: Run, first_model: Path) -> None:
    """Check that vLLM's log-probs at each set's temperature are those of plain transformers, and no near miss is."""
    model = AutoModelForCausalLM.from_pretrained(first_model, dtype=torch.float32)
    first, second = (read_batch(run.directory / "batches", step) for step in (0, 1))
    mean, largest = engine_gap(model, first, TEMPERATURES)
    assert mean <= ON_POLICY_MEAN and largest <= ON_POLICY_MAX
    wrong = {
        "temperature ignored": engine_gap(model, first, {"plain": 1.0, "other": 1.0}),
        "one temperature for both sets": engine_gap(model, first, {"plain": 0.6, "other": 0.6}),
        "off by one": engine_gap(model, first, TEMPERATURES, shift=1),
        "stale version": engine_gap(model, second, TEMPERATURES),
    }
    assert [name for name, (mean, largest) in wrong.items() if mean <= ON_POLICY_MEAN or largest <= ON_POLICY_MAX] == []


def engine_gap(model: Any, batch: DumpedBatch, temperatures: dict[str, float], shift: int = 0) -> tuple[float, float]:
    """Mean and largest |engine's - transformers'| log-prob over all response tokens, first and EOS included.

    `temperatures`: by data set.
    """
    gaps = []
    for row in batch.trajectories:
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        with torch.no_grad():
            logits = model(ids).logits[0] / temperatures[row.dataset]
        at = torch.arange(len(row.prompt_ids), ids.shape[1]) - 1 - shift
        expected = logits[at].log_softmax(-1).gather(1, ids[0, len(row.prompt_ids) :, None])[:, 0]
        gaps.append((torch.tensor(row.rollout_logprobs) - expected).abs())
    assert sum(map(len, gaps)) == sum(len(row.response_ids) for row in batch.trajectories) > 0
    every = torch.cat(gaps)
    return float(every.mean()), float(every.max())


@pytest.mark.slow
@pytest.mark.parametrize("last", ["gradient", "logprobs"])
def test_numbers_that_are_not_finite_cost_a_step_and_then_stop_the_run_with_its_batch(
    tmp_path: Path, last: str
) -> None:
    """All log-probs of step 0 are bad: it is skipped, and so is a later one whose gradient is.

    No further step may be skipped, whichever number is bad there.
    """
    mark, rng = tmp_path / "mark", moments()
    config = tiny_config(tmp_path, steps=400)
    chosen = rng.randint(2, 8)
    steps = [0, chosen, chosen + 1] if last == "logprobs" else [0]
    config["agent"] = {
        "loop": "tests.support.rollout.damaged_engine:NanLogprobs",
        "kwargs": {"steps": steps, "groups": 4},
    }
    config["reward"] = {
        "function": "tests.support.rewards.reward_functions:overflowing_at", "kwargs": {"mark": str(mark)},
    }  # fmt: skip
    config["algorithm"] = {"advantage": "dr_grpo"}
    most = 1 if last == "logprobs" else 2
    config["trainer"] |= {"max_skipped_steps": most, "micro_batch_tokens": 512}
    config["evaluation"], config["telemetry"] = {}, {"dump_batches": True}
    run_dir, process = tmp_path / "run", start_run(config)
    with killed_after(process, run_dir):
        wait_for(lambda: metric_steps(run_dir) >= 1, process)
        if last == "gradient":
            time.sleep(rng.uniform(0.0, 3.0))
            mark.touch()
            wait_for(lambda: len(skipped_steps(step_records(run_dir))) == most, process)
            wait_for(lambda: metric_steps(run_dir) > skipped_steps(step_records(run_dir))[-1] + 2, process)
            mark.touch()
        output, _ = process.communicate(timeout=600)
    run = Run(process.returncode, output, run_dir)
    assert run.code != 0
    kept = run.directory / "failed_batch"
    check_skipped_logprobs(run, kept, most)
    if last == "gradient":
        assert f"the step is skipped ({most} of at most {most})" in run.output
        rewards = [row.reward for row in read_batch(kept, skipped_steps(run.metrics)[1]).trajectories]
        assert len(rewards) == 16 and max(rewards) > 1e38
    check_counts_of_skipped_steps(run, most)
    done = len(run.metrics)
    what = BAD_LOGPROBS if last == "logprobs" else r"the (loss|gradient norm) is (nan|-?inf)"
    assert re.search(f"megarl: step {done}: {what}.* the batch is kept in {kept}", run.output), run.output[-4000:]
    assert run.summary["exit"] == "failed" and run.summary["steps"] == done
    assert len(read_batch(kept, done).trajectories) == 16
    assert_nothing_left(run.directory)


BAD_LOGPROBS = "the log-probs that the engines returned are not finite in 16 of 16 samples"


def skipped_steps(records: list[dict[str, Any]]) -> list[int]:
    """The numbers of the steps whose groups have failed, from 0."""
    return [record["step"] - 1 for record in records if record["groups/failed"]]


def check_counts_of_skipped_steps(run: Run, count: int) -> None:
    """All groups of as many steps have failed; each other step trains, and no group is in two steps."""
    records, skipped = run.metrics, skipped_steps(run.metrics)
    assert len(skipped) == count and skipped[0] == 0 and skipped[-1] < len(records) - 1
    seen: set[int] = set()
    for step, record in enumerate(records):
        groups = {row.group_id for row in read_batch(run.directory / "batches", step).trajectories}
        assert len(groups) == 4 and not groups & seen
        seen |= groups
        assert sum(record[f"groups/{end}"] for end in ENDS) == record["groups/admitted"] == 4
        if step in skipped:
            assert (record["groups/failed"], record["groups/trained"]) == (4, 0) and "policy/grad_norm" not in record
        else:
            assert record["groups/trained"] > 0 and math.isfinite(record["policy/grad_norm"])
            assert record["mismatch/logprob_abs_diff_max"] <= ON_POLICY_MAX
    assert records[-1]["total/groups_admitted"] == 4 * len(records)
    for end in ENDS:
        assert records[-1][f"total/groups_{end}"] == sum(record[f"groups/{end}"] for record in records)


def check_skipped_logprobs(run: Run, kept: Path, most: int) -> None:
    """Step 0 is reported as skipped, and its batch is kept as it was."""
    said = f"step 0: {BAD_LOGPROBS} .* is kept in {kept}; the step is skipped .1 of at most {most}"
    assert re.search(said, run.output), run.output[-4000:]
    rows = read_batch(kept, 0).trajectories
    assert len(rows) == 16 and all(row.response_ids and row.rollout_logprobs[0] < 0 for row in rows)
    assert all(math.isnan(row.rollout_logprobs[-1]) and "log-prob nan" in row.failure for row in rows)


def check_command_lines(run_dir: Path, processes: set[psutil.Process], password: str) -> None:
    """Every user of a host can read them: none holds a secret, those of the run's own or one that its config names."""
    secret = run_secret(run_dir)
    hidden = {
        "Ray's token": (run_dir / "ray_token").read_text().strip(),
        "the run's secret": secret.hex(),
        "the value of {env: NAME}": password,
    }
    lines = [" ".join(each.cmdline()) for each in processes if each.is_running()]
    assert len(lines) > 8 and any("train_rl.py" in line for line in lines), lines
    assert [(what, line) for what, value in hidden.items() for line in lines if value in line] == []


def test_killed_engine_then_killed_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL of the only engine at a random moment: it is replaced and the run goes on, until torchrun is killed."""
    rng = moments()
    monkeypatch.setenv("MEGARL_TEST_SECRET", password := secrets.token_hex(16))
    config = tiny_config(tmp_path, steps=5000)
    config["evaluation"], config["telemetry"] = {}, {"dump_batches": True}
    config["reward"] = {
        "function": "tests.support.rewards.reward_functions:knows_a_password",
        "kwargs": {"password": {"env": "MEGARL_TEST_SECRET"}, "digest": hashlib.sha256(password.encode()).hexdigest()},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    process = start(path)
    run_dir = tmp_path / "run"
    try:
        wait_for(lambda: metric_steps(run_dir) >= 1, process)
        check_on_loopback(run_dir, "train_rl.py", "ray::TransferQueueController", "ray::SimpleStorageUnit")
        everybody = family(run_dir, process)
        check_command_lines(run_dir, everybody, password)
        [engine] = actors(run_dir, "EngineReplica")
        time.sleep(rng.uniform(0.0, 2.0))
        engine.kill()
        wait_for(lambda: is_replaced(run_dir), process)
        everybody |= family(run_dir, process)
        wait_for(lambda: is_recovered(run_dir), process, 120)
    finally:
        if process.poll() is None:
            process.kill()
        output, _ = process.communicate(timeout=600)
    _, left = psutil.wait_procs(everybody, timeout=120)
    assert left == []
    check_every_group_once(Run(process.returncode, output, run_dir), metric_steps(run_dir))
    assert_nothing_left(run_dir)


@pytest.mark.slow
def test_a_replica_killed_in_the_middle_of_a_sync_costs_the_other_one_nothing_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two dies after its first tensors of version 2: it is named, and the other one takes everything again."""
    monkeypatch.setenv("MEGARL_TEST_DIES_IN_SYNC", str(tmp_path / "died"))
    config = tiny_config(tmp_path, steps=4)
    config["timeouts"]["weight_sync_s"] = 40  # a silent engine is known by this alone
    config["rollout"] |= {
        "replicas": 2,
        "engine_kwargs": {"worker_extension_cls": "tests.support.engines.dies_in_sync.DiesInSync"},
    }
    run = train(config)
    assert (tmp_path / "died").exists()
    check_finished(run, steps=4, samples=64)  # the log-probs of every later token agree
    to_go_on = run.metrics[1]["time/sync"]
    print(f"the run went on {to_go_on:.1f} s after the sync had begun in which a replica was killed")
    assert [record["sync/restarted_replicas"] for record in run.metrics] == [0, 1, 0, 0]
    logs = {path.stem: path.read_text() for path in (run.directory / "logs").glob("*.log")}
    assert "weight sync of version 2 failed during update: engine replica 1" in logs["trainer-rank-0"]
    assert "the pool continues without replica 1" in logs["controller"]
    syncs = [line.split(maxsplit=2) for line in (tmp_path / "died.syncs").read_text().splitlines()]
    others = [(pid, version) for pid, version, member in syncs if "replica 0" in member]
    assert len({pid for pid, _ in others}) == 1, "the other one was restarted"
    assert [version for _, version in others].count("2") == 2, "it has not taken everything again"
    assert to_go_on < 40, "a dead engine is noticed before the deadline, and nobody waits for a new one"
    assert_nothing_left(run.directory)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["supervisor", "agent"])
def test_killed_alone_in_a_living_run_it_takes_everything_along(tmp_path: Path, victim: str) -> None:
    """SIGKILL hits the supervisor under training ranks, or torchrun over a training pool."""
    config = tiny_config(tmp_path, steps=5000)
    config["evaluation"] = {}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    process, run_dir = start(path), tmp_path / "run"
    wait_for(lambda: metric_steps(run_dir) >= 1, process)
    everybody = family(run_dir, process)
    assert len(everybody) > 6
    if victim == "agent":
        process.kill()
    else:
        psutil.Process(json.loads((run_dir / "supervisor.json").read_text())["process"]["pid"]).kill()
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode != 0
    if victim == "supervisor":
        assert output.count("megarl: ") == 2 and "supervisor" in output, output[-3000:]
    _, left = psutil.wait_procs(everybody, timeout=120)
    assert left == []
    assert_nothing_left(run_dir)


def family(run_dir: Path, process: subprocess.Popen[str]) -> set[psutil.Process]:
    """Everything that runs below torchrun and below the supervisor. Ray's actors overwrite their environment."""
    supervisor = json.loads((run_dir / "supervisor.json").read_text())["process"]["pid"]
    roots = [psutil.Process(process.pid), psutil.Process(supervisor)]
    return {*roots, *(child for root in roots for child in root.children(recursive=True))}


def is_replaced(run_dir: Path) -> bool:
    """Return whether a sync has replaced the engine and the run has gone on."""
    return any(record.get("sync/restarted_replicas") for record in step_records(run_dir)[:-1])


def is_recovered(run_dir: Path) -> bool:
    """Return whether the events tell of the lost engine, and then that the run goes on."""
    events = sorted(read_events(run_dir, {"fault", "recovery"}), key=lambda each: each.begin)
    found = [each.name for each in events if (each.args["kind"], each.replica) == ("engine", 0)]
    return "recovery" in found and found[0] == "fault"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.parallel.tensr=2", "did you mean"),
        ("trainer.gpus=3", "torchrun started 2 ranks"),
        ("model.path=no/such/model", "no/such/model"),
        ("sampling.top_p=0.9", "sampling.top_p: no such key; remove it"),
    ],
)
def test_mistakes_end_before_anything_starts(tmp_path: Path, override: str, message: str) -> None:
    config = tiny_config(tmp_path)
    run = train(config, override)
    assert run.code != 0
    assert run.output.count("megarl: ") == 1 and message in run.output
    assert not (run.directory / "supervisor.json").exists()


def test_malformed_data_is_named(tmp_path: Path) -> None:
    """A broken line is found before anything starts, and named by file and line."""
    config = tiny_config(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"problem": "What is\n')
    run = train(config)
    assert run.code != 0
    assert f"{tmp_path / 'train.jsonl'}:49:13: not JSON" in run.output
    assert not (run.directory / "supervisor.json").exists()
    assert_nothing_left(run.directory)


@pytest.mark.slow
def test_a_tokenizer_that_ends_no_response_is_named(tmp_path: Path) -> None:
    """Without an EOS anywhere, every response would be cut at its limit: nothing is trained, and nothing is left."""
    config = tiny_config(tmp_path)
    model = tmp_path / "model"
    for name, key in (("generation_config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        content = json.loads((model / name).read_text())
        del content[key]
        (model / name).write_text(json.dumps(content))
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "--"))
    run = train(config)
    assert run.code != 0
    assert "megarl: " in run.output and "no stop token: " in run.output and "sampling.stop_token_ids" in run.output
    assert step_records(run.directory) == []
    assert_nothing_left(run.directory)
