"""The token of the gateway's clients, and the files that tell them where the gateway is."""

from pathlib import Path

import pytest

from megarl.common.trust.run_secret import derive_key, run_token
from megarl.gateway.token_file import gateway_token, read_gateway_file, read_token, write_gateway_file, write_token


def test_the_token_derives_from_the_runs_token_and_is_not_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 32)
    token = gateway_token()
    assert token == gateway_token() and len(token) == 64
    assert run_token() not in token and token not in {derive_key("queue").hex(), derive_key("").hex()}
    monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 32)
    assert gateway_token() != token


def test_the_files_are_for_the_user_only(tmp_path: Path) -> None:
    file = write_token(tmp_path, "x" * 32)
    write_gateway_file(tmp_path, "http://127.0.0.1:5", file)
    assert read_token(file) == "x" * 32
    gateway = read_gateway_file(tmp_path)
    assert gateway == {"url": "http://127.0.0.1:5", "base_url": "http://127.0.0.1:5/v1", "token_file": str(file)}
    for name in ("gateway.json", "gateway_token"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    write_token(tmp_path, "y" * 32)  # a later start
    assert read_token(file) == "y" * 32 and sorted(p.name for p in tmp_path.iterdir()) == [
        "gateway.json",
        "gateway_token",
    ]


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("x" * 32, 0o644, "mode 0600"),
        ("x" * 32, 0o660, "mode 0600"),
        ("short", 0o600, "at least 16"),
        ("two words, which are long enough", 0o600, "no white space"),
        ("é" * 32, 0o600, "ASCII"),
    ],
)
def test_a_token_file_that_protects_nothing_is_refused(tmp_path: Path, content: str, mode: int, message: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(ValueError, match=message):
        read_token(file)
