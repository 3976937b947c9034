"""Error responses in OpenAI's shape, which is also Anthropic's except for `type`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from torchwright.serve.log import one_line


class ApiError(Exception):
    """A request that ends without an answer: an HTTP status and the error object.

    `message` and `param` may hold what a client wrote: they are cut and escaped here.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.message = one_line(message)
        super().__init__(self.message)
        self.status, self.param, self.code = status, param and one_line(param), code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON object that is sent as the response, or as the last event of a stream."""
        return msgspec.json.encode(
            {
                "type": "error",
                "error": {
                    "message": self.message,
                    "type": _TYPES.get(self.status, "invalid_request_error"),
                    "param": self.param,
                    "code": self.code,
                },
            }
        )


_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the client can mend it."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after_s: float = 1.0, code: str = "engine_unavailable") -> ApiError:
    """A 503: the engine is not there now; the client may try again after `retry_after_s` seconds."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(max(1, round(retry_after_s)))})
