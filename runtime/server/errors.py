"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from typing import Any

from compress.errors import UserError, nearest

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
JSON = "application/json"
GONE = 499  # nobody reads it: the client has closed the connection


class ApiError(Exception):
    """A refusal with its HTTP status; `param` is the field at fault, `code` a name for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}


class ClientGone(ApiError):
    def __init__(self) -> None:
        super().__init__(GONE, "the client closed the connection")


def error_body(error: ApiError) -> dict[str, Any]:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def refusal(error: UserError) -> ApiError:
    """A 400. The runtime's messages start with the field at fault."""
    message = str(error)
    named = re.match(r"[a-z_]+", message)
    return ApiError(400, message, named.group() if named else None)


def from_validation(errors: list[Any], known: frozenset[str], content_type: str = JSON) -> ApiError:
    """The first of pydantic's findings, as one line: field, fault, limit, and the nearest of the `known` names."""
    first, path = errors[0], _path(errors[0], known)
    for error in errors[1:]:  # of a union, the branch that went further is the one that was meant
        longer = _path(error, known)
        if path and len(longer) > len(path) and longer[: len(path)] == path:
            first, path = error, longer
            break
    unknown = first["type"] == "extra_forbidden"
    if unknown:
        path.append(first["loc"][-1])
    field = str(path[0]) if path else None
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if unknown:
        return ApiError(400, f"{where}: unknown field{nearest(str(path[-1]), known)}", field, "unknown_field")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "missing" and field is None:
        return ApiError(400, "the body is empty; it must be a JSON object")
    if field is None and first["type"] in ("model_attributes_type", "dict_type", "model_type"):
        hint = "" if "json" in content_type.lower() else "; send Content-Type: application/json"
        return ApiError(400, f"the body must be a JSON object{hint}")
    told = first["msg"].removeprefix("Value error, ")
    if path in (["prompt"], ["stop"]) and first["type"] == "string_type":
        told = "Input should be a string or a list"
    if field is None:
        return refusal(UserError(told))
    value = first.get("input")
    shown = isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) < 60)
    return ApiError(400, f"{where}: {told}" + (f", not {value!r}" if shown else ""), field)


def _path(error: Any, known: frozenset[str]) -> list[Any]:
    """Names and indices down to a finding: without the branches of a union, which are no field of anybody's."""
    return [part for part in error["loc"] if isinstance(part, int) or part in known]
