"""Fixtures of the gateway's tests: see `tests.support.gateway.gateway_fixtures`."""

from tests.support.gateway.gateway_fixtures import chat_model, gateways

__all__ = ["chat_model", "gateways"]
