"""Texts under names, with a message authentication code (HMAC-SHA256) of name and text. Pure.

Stores of torch accept any value from whoever reaches their port. So each value is signed with a key that only the
processes of the run have, and is read only if its code is right: it must have been written by one of them, under the
same name, and not be changed in a single bit.
"""

from __future__ import annotations

import hmac

from megarl.common.errors import NotAuthentic

_DIGITS = 64  # hexadecimal digits of the code


def sign(key: bytes, name: str, text: str) -> str:
    """Return `text` with the code of its name and content in front."""
    return _code(key, name, text) + text


def verify(key: bytes, name: str, value: str | bytes) -> str:
    """Return the text of a value that `sign` made with this key and this name. Raises NotAuthentic for any other."""
    if not key:
        raise ValueError("there is no key to check values with")
    try:
        content = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        content = ""
    code, text = content[:_DIGITS], content[_DIGITS:]
    if not hmac.compare_digest(code.encode(), _code(key, name, text).encode()):
        raise NotAuthentic(
            f"the value of {name!r} was not written by a process of this run, or not under this name: a process of "
            "another run or of another user has reached the run's port. Nothing was read from it"
        )
    return text


def _code(key: bytes, name: str, text: str) -> str:
    head = name.encode()
    # The length separates name and text: no other pair has the same bytes.
    return hmac.digest(key, len(head).to_bytes(8, "big") + head + text.encode(), "sha256").hex()
