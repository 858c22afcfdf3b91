"""Prompt files as they are found, and every mistake named by file, line and field."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema.data import DataConfig
from megarl.data.dataset import PromptDataset, load_prompts
from tests.support.checkout import EXCERPTS


def load(path: Path, limit: int | None = None, **config: Any) -> PromptDataset:
    return load_prompts(path, DataConfig(path=path, **config), limit)


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
    return path


def test_gsm8k_as_it_is() -> None:
    prompts = load(EXCERPTS / "gsm8k.jsonl")
    assert prompts.format == "gsm8k" and len(prompts) == 8
    first = prompts[0]
    assert first.answer == "72" and first.text.startswith("Natalia sold clips to 48 of her friends")
    assert first.messages == [{"role": "user", "content": first.row["question"]}]
    assert "<<48/2=24>>" in first.row["answer"]  # the row stays whole
    assert [p.index for p in prompts] == list(range(8)) and prompts[-1].index == 7
    assert [p.answer for p in prompts[4:6]] == ["18", "3"]


def test_problem_answer_as_it_is() -> None:
    prompts = load(EXCERPTS / "problems.jsonl", suffix=" Put it in \\boxed{}.", system_prompt="Be brief.")
    assert prompts.format == "problem_answer"
    assert prompts[0].answer == "23.0" and prompts[1].answer == "\\frac{3}{4}"
    assert prompts[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is $3 + 4 \\cdot 5$? Put it in \\boxed{}."},
    ]


VERL_ROW = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "How many are 3 and 4?"}],
    "reward_model": {"ground_truth": "7", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "1"},
}


def test_a_row_of_verl_as_it_is(tmp_path: Path) -> None:
    """DAPO-Math-17k is published so. A row with an answer of its own is another format."""
    path = tmp_path / "dapo.jsonl"
    path.write_text(json.dumps(VERL_ROW) + "\n")
    prompts = load(path, suffix=" Put it in \\boxed{}.")
    assert prompts.format == "verl" and prompts[0].answer == "7" and prompts[0].row == VERL_ROW
    assert prompts[0].messages == [{"role": "user", "content": "How many are 3 and 4? Put it in \\boxed{}."}]
    path.write_text(json.dumps({**VERL_ROW, "answer": "8"}) + "\n")
    other = load(path)
    assert other.format == "fields" and other[0].answer == "8"


def test_the_full_files_load_as_they_are() -> None:
    if "MEGARL_DATA" not in os.environ:
        pytest.skip("MEGARL_DATA is not set: the full data files are not here")
    expected = {
        "gsm8k/train": ("gsm8k", 7473, "72"),
        "gsm8k/test": ("gsm8k", 1319, "18"),
        "math/aime24": ("problem_answer", 30, "204"),
        "math/amc23": ("problem_answer", 40, "27.0"),
    }
    for name, (kind, rows, first) in expected.items():
        prompts = load(Path(os.environ["MEGARL_DATA"]) / f"{name}.jsonl")
        assert (prompts.format, len(prompts), prompts[0].answer) == (kind, rows, first)
        assert prompts[rows - 1].index == rows - 1


def test_named_fields_strings_messages_and_nested_ones(tmp_path: Path) -> None:
    named = write(tmp_path / "a.jsonl", {"q": "2+2?", "gold": 4, "level": 3})
    prompt = load(named, prompt_field="q", answer_field="gold")[0]
    assert (prompt.text, prompt.answer, prompt.row["level"]) == ("2+2?", "4", 3)
    chat = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3?"}]
    nested = write(tmp_path / "b.jsonl", {"prompt": chat, "reward_model": {"ground_truth": "3"}})
    prompt = load(nested, answer_field="reward_model.ground_truth", suffix="!")[0]
    assert [m["content"] for m in prompt.messages] == ["2?!", "2", "3?!"]
    assert (prompt.text, prompt.answer) == ("3?!", "3")


def called(arguments: object) -> dict:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_messages_of_several_turns_with_calls_of_tools(tmp_path: Path, arguments: object) -> None:
    """Parquet and OpenAI's API have the arguments as JSON text; chat templates want an object."""
    answer = {"role": "tool", "content": "", "name": "add", "tool_call_id": "a"}
    asked, again = {"role": "user", "content": "1+1?"}, {"role": "user", "content": "And now?"}
    for messages in ([asked, called(arguments), answer], [asked, called(arguments), answer, again]):
        path = write(tmp_path / "m.jsonl", {"messages": messages, "answer": "2"})
        prompt = load(path, suffix="!")[0]
        assert prompt.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
        assert prompt.messages[1]["content"] == "" and prompt.messages[2] == answer
        assert prompt.text == f"{messages[3]['content'] if len(messages) > 3 else '1+1?'}!"


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def test_calls_of_a_parquet_file_have_their_own_arguments_only(tmp_path: Path) -> None:
    """Arrow gives each call the arguments of all others, as null."""
    calls = [("search", {"query": "tides"}), ("add", {"a": 1, "b": 2}), ("now", {})]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Go on."},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
                },
                {"role": "tool", "content": "r"},
            ],
            "answer": "1",
        }
        for name, arguments in calls
    ]
    prompts = load(parquet(tmp_path / "p.parquet", *rows))
    read = [prompt.messages[1]["tool_calls"][0]["function"]["arguments"] for prompt in prompts]
    assert read == [arguments for _, arguments in calls]


ADD_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_a_rows_own_tools_are_shown_or_refused(tmp_path: Path) -> None:
    row = {"problem": "1+1?", "answer": "2"}
    paths = [write(tmp_path / f"{at}.jsonl", {**row, "tools": given}) for at, given in enumerate(TOOLS_COLUMNS)]
    for path in paths[:2]:
        assert load(path, tools_field="tools")[0].tools == (ADD_TOOL,)
    with pytest.raises(ValueError, match=r"its own `tools`; set data\.tools_field"):
        load(paths[0])
    for path in paths[2:4]:
        assert load(path)[0].tools == ()  # a column that only has the name
    for path in paths[3:]:
        with pytest.raises(ValueError, match="must be a list of tools"):
            load(path, tools_field="tools")


TOOLS_COLUMNS = [[ADD_TOOL], json.dumps([ADD_TOOL]), None, "hammer", [{"name": 4}]]


@pytest.mark.parametrize("missing", [math.nan, math.inf, None])
def test_an_answer_that_is_missing_is_refused(tmp_path: Path, missing: float | None) -> None:
    rows = [{"problem": "1+1?", "answer": 2.0}, {"problem": "1+2?", "answer": missing}]
    with pytest.raises(ValueError, match=r"row 2: field 'answer' is (not a number|null)"):
        load(parquet(tmp_path / "p.parquet", *rows))


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+1?", "name": None}], "answer": i + 1, "extra": {"id": i}}
        for i in range(300)
    ]
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=64)
    prompts = load(path)
    assert prompts.format == "fields" and len(prompts) == 300
    assert (prompts[299].text, prompts[299].answer, prompts[299].row["extra"]) == ("299+1?", "300", {"id": 299})
    assert [p.answer for p in prompts[62:66]] == ["63", "64", "65", "66"]
    gsm = tmp_path / "g.parquet"
    excerpt = [json.loads(line) for line in (EXCERPTS / "gsm8k.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(excerpt), gsm)
    assert load(gsm).format == "gsm8k" and load(gsm)[0].answer == "72"
    bad = pyarrow.Table.from_pylist([{"problem": "1?", "answer": "1"}, {"problem": None, "answer": "2"}])
    pyarrow.parquet.write_table(bad, path)
    with pytest.raises(ValueError, match=r"p\.parquet, row 2: field 'problem' is null"):
        load(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"p\.parquet is not a readable Parquet file"):
        load(path)


def test_limit_and_blank_lines(tmp_path: Path) -> None:
    good = {"problem": "1?", "answer": "1"}
    path = write(tmp_path / "x.jsonl", "", good, "   ", {**good, "answer": "2"}, "broken")
    assert [p.answer for p in load(path, limit=2)] == ["1", "2"]
    assert [p.where for p in load(path, limit=2)] == [f"{path}:2", f"{path}:4"]
    with pytest.raises(ValueError, match=r"x\.jsonl:5:1: not JSON"):
        load(path)


GOOD = {"problem": "1?", "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        ([GOOD, '{"problem": "1?", '], {}, r":2:19: not JSON: Expecting property name"),
        ([GOOD, GOOD, "[1]"], {}, r":3: must be a JSON object, not list"),
        (["["], {}, r":1:2: not JSON: .* not one array"),
        ([GOOD, b'{"problem": "\xff"}'], {}, r":2:14: not UTF-8 at byte 13"),
        (['{"problem": ' + "9" * 5000 + "}"], {}, r":1: not JSON that can be read: Exceeds the limit"),
        (["[" * 100_000], {}, r":1: not JSON that can be read: maximum recursion"),
        ([GOOD, {"problem": "2?"}], {}, r":2: field 'answer' is missing; the row has \['problem'\]"),
        ([GOOD, {"problem": 3, "answer": "3"}], {}, r":2: field 'problem' must be a non-empty string, not 3"),
        ([GOOD, {"problem": " ", "answer": "3"}], {}, r":2: field 'problem' must be a non-empty string"),
        ([GOOD, {"problem": "x", "answer": None}], {}, r":2: field 'answer' is null"),
        ([GOOD, {"problem": "x", "answer": ["1"]}], {}, r":2: field 'answer' must be a string or a number"),
        ([{"question": "x", "answer": "1"}], {}, r":1: unknown format: .* set data.prompt_field"),
        ([{"text": "x"}], {}, r":1: unknown format: .*; the row has \['text'\]"),
        ([{"question": "x", "answer": "1"}], {"format": "gsm8k"}, r":1: field 'answer' has no number after '####'"),
        ([{"prompt": "x", "answer": "1"}], {"answer_field": "gold"}, r":1: field 'gold' is missing"),
        ([{"prompt": [], "answer": "1"}], {}, r":1: field 'prompt' must be a string or a list of messages"),
        ([{"prompt": [{"role": "user"}], "answer": "1"}], {}, "a message must have role and content"),
        (
            [{"prompt": [{"role": "bot", "content": "x"}], "answer": "1"}],
            {},
            "a role must be one of system, .*, not 'bot'",
        ),
        ([{"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"}], {}, "must hold a user message"),
        (
            [{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}], "answer": "1"}],
            {"system_prompt": "y"},
            "remove data.system_prompt",
        ),
        ([{"messages": [{"role": "user", "content": "x", "name": "y"}], "answer": "1"}], {}, "no field 'name'"),
        ([{"messages": [{"role": "assistant", "tool_calls": 4}], "answer": "1"}], {}, "tool_calls must be a list"),
        ([{"messages": [{"role": "assistant", "tool_calls": [4]}], "answer": "1"}], {}, "must have function.name"),
        ([{"messages": [called("{")], "answer": "1"}], {}, "must have function.name and function.arguments"),
        ([], {}, "holds no rows"),
        (["", "  "], {}, "holds no rows"),
    ],
)
def test_mistakes_are_named_by_file_line_and_field(tmp_path: Path, rows: list, config: dict, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(ValueError, match=message) as caught:
        load(path, **config)
    assert "bad.jsonl" in str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="is not a file"):
        load(tmp_path)


def test_a_file_that_changes_under_a_run_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", GOOD, GOOD)
    prompts = load(path)
    write(path, {"problem": "another", "answer": "1"}, GOOD)
    with pytest.raises(ValueError, match="has changed since"):
        prompts[0]
    with pytest.raises(IndexError):
        prompts[2]
