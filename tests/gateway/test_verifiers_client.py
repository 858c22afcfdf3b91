"""verifiers' training client, unchanged, in an environment of its own, whose pins clash with megarl's.

python -m venv DIR && DIR/bin/pip install verifiers==0.4.0 renderers==0.1.12
MEGARL_VERIFIERS_PYTHON=DIR/bin/python python -m pytest tests/gateway/test_verifiers_client.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megarl.chat.tokenize import load_tokenizer
from tests.support.checkout import ROOT
from tests.support.gateway.gateway_requests import get
from tests.support.gateway.gateway_stand_in import TOKEN

VARIABLE = "MEGARL_VERIFIERS_PYTHON"


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python with verifiers 0.4.0")
def test_what_verifiers_trains_on_is_what_the_gateway_has_recorded(gateways, chat_model: Path) -> None:
    said = [*load_tokenizer(chat_model)("Hello there", add_special_tokens=False)["input_ids"], 2]
    gateway = gateways(lambda request: said)
    command = [
        os.environ[VARIABLE],
        str(ROOT / "tests/support/gateway/verifiers_client.py"),
        gateway.url,
        str(chat_model),
    ]
    done = subprocess.run(
        command, env={**os.environ, "GATEWAY_TOKEN": TOKEN}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    [turn] = get(gateway, "/v1/sessions/verifiers")["turns"]
    assert seen["content"] == "Hello there" and seen["completion_ids"] == said == turn["response_ids"]
    assert seen["prompt_ids"] == turn["prompt_ids"] and seen["logprobs"] == turn["logprobs"]
