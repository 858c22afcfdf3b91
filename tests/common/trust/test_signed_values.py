"""A value is read only as it was signed: same key, same name, every bit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.errors import NotAuthentic
from megarl.common.trust.signed_store import sign, verify

KEY = b"key of the run"


@given(st.text(), st.text())
def test_what_was_signed_is_read(name: str, text: str) -> None:
    value = sign(KEY, name, text)
    assert verify(KEY, name, value) == verify(KEY, name, value.encode()) == text


@given(st.text(max_size=20), st.text(max_size=20), st.data())
def test_no_bit_may_change(name: str, text: str, data: st.DataObject) -> None:
    value = bytearray(sign(KEY, name, text).encode())
    value[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(NotAuthentic, match="was not written by a process of this run"):
        verify(KEY, name, bytes(value))


@given(st.text(), st.text(), st.text())
def test_a_value_is_of_one_name_and_one_key(name: str, other: str, text: str) -> None:
    if other == name:
        other += "x"
    for key, place in ((KEY, other), (b"another", name)):
        with pytest.raises(NotAuthentic):
            verify(key, place, sign(KEY, name, text))
    # A part of the text cannot become a part of the name.
    with pytest.raises(NotAuthentic):
        verify(KEY, name + "x", sign(KEY, name, "x" + text)[:64] + text)


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_refused_with_the_named_error(value: bytes) -> None:
    with pytest.raises(NotAuthentic, match="'save/1/0'"):
        verify(KEY, "save/1/0", value)


def test_without_a_key_nothing_is_read() -> None:
    with pytest.raises(ValueError, match="no key"):
        verify(b"", "name", sign(b"x", "name", "text"))
