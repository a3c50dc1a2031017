"""What goes wrong over HTTP: one error in the OpenAI shape, with its status."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer that is an error: a status, a text, and the parameter at fault.

    ``retry_after_s`` is when to ask again, for what will pass.
    """

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None,
        param: str | None = None, retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the error as the OpenAI API writes it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that go with it."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    @classmethod
    def bad_request(cls, message: str, param: str | None = None) -> ApiError:
        """Return the error of a request that cannot be served as it is."""
        return cls(400, message, param=param)

    @classmethod
    def engine_failed(cls, message: str) -> ApiError:
        """Return the error of a request that an engine could not finish."""
        return cls(500, message, kind="server_error", code="engine_failed")

    @classmethod
    def engine_lost(cls) -> ApiError:
        """Return the error of a request whose engine ended under it."""
        return cls(
            503, "got an engine that ended while it ran this request; the answer is lost; send the request again",
            kind="server_error", code="engine_lost", retry_after_s=5,
        )  # fmt: skip

    @classmethod
    def stopping(cls) -> ApiError:
        """Return the error of a request that a server's end cuts off or meets."""
        return cls(
            503, "got a server that is shutting down; need a running one; send the request again",
            kind="server_error", code="shutting_down", retry_after_s=5,
        )  # fmt: skip
