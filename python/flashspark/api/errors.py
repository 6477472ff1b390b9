"""Refusals and failures, and the body that each family of routes gives them."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from .wire import json_response

_TYPE_OF_STATUS = {400: "BadRequestError", 500: "InternalServerError", 503: "ServiceUnavailableError"}
_CODE_OF_STATUS = {401: "invalid_api_key", 404: "not_found", 413: "request_too_large", 503: "unavailable"}


class RequestError(Exception):
    """A request that is not answered as asked. Raised before the first byte of an answer.

    `param` names the field, `code` is the machine-readable reason of OpenAI's nested shape, `schema` marks what
    a type check found (a shape of its own on `/generate`).
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        schema: bool = False,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code or _CODE_OF_STATUS.get(status) or ("invalid_value" if param else "invalid_request")
        self.schema = schema
        self.retry_after_s = retry_after_s


def unavailable(message: str, retry_after_s: int = 1) -> RequestError:
    """503 with Retry-After: only for what trying again, here or elsewhere, can cure."""
    return RequestError(message, status=503, retry_after_s=retry_after_s)


def is_openai_route(path: str) -> bool:
    """Routes that answer errors in OpenAI's shape."""
    return path.startswith("/v1/") or path in {"/tokenize", "/detokenize"}


def openai_error(error: RequestError) -> dict[str, Any]:
    """SGLang's flat keys and OpenAI's nested object in one: SDKs read the second, older scripts the first."""
    kind = _TYPE_OF_STATUS.get(error.status, str(error.status))
    if error.schema:
        kind = "Bad Request"
    nested_kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "object": "error",
        "message": error.message,
        "type": kind,
        "param": error.param,
        "code": error.status,
        "error": {
            "message": error.message,
            "type": nested_kind,
            "param": error.param,
            "code": error.code,
        },
    }


def openai_stream_error(error: RequestError) -> dict[str, Any]:
    """The object of an error frame, after frames have been sent."""
    flat = openai_error(error)
    del flat["error"]
    return {"error": flat}


def native_error(error: RequestError) -> dict[str, Any]:
    """`/generate` and its neighbours: three shapes, by what went wrong."""
    if error.status >= 500:
        flat = openai_error(error)
        del flat["error"]
        return flat | {"type": str(error.status)}
    if error.schema:
        return {"error": error.message}
    return {"error": {"message": error.message}}


def native_stream_error(error: RequestError) -> dict[str, Any]:
    """The object of an error frame, after frames have been sent."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    details = {"message": error.message, "type": kind, "code": error.status, "retryable": error.status == 503}
    return {"error": details}


def error_response(path: str, error: RequestError) -> Response:
    """The answer to a refused request, in the shape of its route."""
    body = openai_error(error) if is_openai_route(path) else native_error(error)
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else None
    return json_response(body, status=error.status, headers=headers)
