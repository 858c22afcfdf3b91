"""Copies of frozen dataclasses with other fields."""

from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from megarl.common.values import changed


@dataclass(frozen=True)
class Point:
    """A class as the states of agents are."""

    x: int
    y: int = 2
    names: tuple[str, ...] = field(default_factory=tuple)


def test_a_changed_copy_is_what_replace_makes() -> None:
    point = Point(1, names=("a",))
    copy = changed(point, x=5)
    assert copy == replace(point, x=5) and hash(copy) == hash(replace(point, x=5))
    assert point == Point(1, 2, ("a",)), "the original is as it was"
    assert copy.names is point.names
    with pytest.raises(FrozenInstanceError):
        copy.x = 6  # type: ignore[misc]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="Point has no field z"):
        changed(Point(1), z=3)
