"""The errors that the door answers with, in OpenAI's form: what was wrong, in which field, and the HTTP status."""

from __future__ import annotations

from megarl.rollout.fleet.external_requests import Failure

TOO_LONG, NO_TURN_LEFT = "context_length_exceeded", "no_turn_left"
BOUNDS = (TOO_LONG, NO_TURN_LEFT)  # the codes of errors that end a trajectory


class ApiError(Exception):
    """A request cannot be answered. `field` is the one that is wrong, `code` a name for programs."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", field: str | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind, self.field, self.code = status, message, kind, field, code

    def content(self) -> dict[str, object]:
        """Return the JSON content of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.field, "code": self.code}}


def refused(field: str, why: str) -> ApiError:
    """Return the error of a field whose value is wrong or not supported."""
    return ApiError(400, f"{field}: {why}", field=field)


def unauthorized() -> ApiError:
    """Return the error of a request without the right token."""
    told = "the bearer token is missing or wrong; the token of this door is in the file that door.json names"
    return ApiError(401, told, kind="authentication_error", code="invalid_api_key")


def too_long(prompt: int, most: int) -> ApiError:
    """Return the error of a prompt after which no token fits."""
    told = f"the prompt has {prompt} tokens; with one of a response it may have {most} (max_model_len)"
    return ApiError(400, told, field="messages", code=TOO_LONG)


def no_turn_left(most: int) -> ApiError:
    """Return the error of a request beyond those that its session may make."""
    return ApiError(400, f"the session has made the {most} requests that it may make (most_turns)", code=NO_TURN_LEFT)


def not_generated(failure: Failure, message: str) -> ApiError:
    """Return the error of a response that the pool did not complete."""
    if failure == "refused":
        return ApiError(400, message)
    if failure == "late":
        return ApiError(504, message, kind="timeout_error", code="timeout")
    return ApiError(503, f"the rollout pool could not answer: {message}", kind="server_error", code="unavailable")
