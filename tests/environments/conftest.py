"""The stand-in doors of the tests of harnesses: see `tests.support.gateway.door_fixtures`."""

from tests.support.gateway.door_fixtures import chat_model, doors

__all__ = ["chat_model", "doors"]
