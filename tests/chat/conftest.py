from typing import Any

import pytest

from tests.support.models.bpe_tokenizer import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(eos_token="<|end|>")
