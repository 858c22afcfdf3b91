"""The run's token as a process finds it, and the keys that derive from it."""

from pathlib import Path

import pytest

from megarl.common.trust.run_secret import derive_key, run_token


@pytest.fixture(autouse=True)
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_environment_comes_first_then_its_file_then_rays_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of this user, by Ray\n")
    assert run_token() == "of this user, by Ray"
    (tmp_path / "token").write_text("of this run, in a file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert run_token() == "of this run, in a file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", " in the environment ")
    assert run_token() == "in the environment"


def test_without_a_token_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fixes = r"without ray\.address .*unset RAY_AUTH_MODE.*with ray\.address, set RAY_AUTH_TOKEN_PATH"
    with pytest.raises(ValueError, match=rf"no token of the run .*auth_token.*{fixes}"):
        run_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "short")
    with pytest.raises(ValueError, match="the token in RAY_AUTH_TOKEN has 5 characters; it must have at least 16"):
        run_token()


def test_a_key_is_of_one_token_and_one_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for token in ("0123456789abcdef", "0123456789abcdeg"):
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        keys += [derive_key("one"), derive_key("two")]
        assert keys[-2:] == [derive_key("one"), derive_key("two")]
    assert len(set(keys)) == 4 and {len(key) for key in keys} == {32}
