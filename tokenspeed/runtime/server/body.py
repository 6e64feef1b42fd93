"""The body of a request: from bytes to a JSON object, or one kind of error (400, code invalid_body) whatever is wrong.

What passes can be represented everywhere behind: strings are Unicode, numbers are JSON's, nesting is bounded. A fault
within a field names the field. It hangs on FastAPI's route, so the schema in /openapi.json stays FastAPI's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tokenspeed.runtime.server.protocol import FIELDS

MAX_DEPTH = 128  # of lists and objects within each other; a JSON schema has some twenty

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a pair as a rule: a hint to look
_SURROGATE = re.compile("[\ud800-\udfff]")  # after parsing every pair is one character
_NOT_JSON = object()  # stands for NaN and the infinities, which Python's parser takes


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyError(HTTPException):
    """The body is no request at all."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, f"{param}: {message}" if param else message)
        self.param = param


class BodyRoute(APIRoute):
    """A route whose body, where it takes one, is read by `parse`: it has no parameters then but that and the request.

    FastAPI describes it in the schema; its own way from the bytes to the call costs a third of a request's time.
    """

    handler: Handler | None = None  # of a route that takes a body

    def get_route_handler(self) -> Handler:
        given = self.dependant
        if not given.body_params:
            return super().get_route_handler()
        assert not (given.path_params or given.query_params or given.header_params or given.dependencies), self.path
        (param,) = given.body_params
        name, model = param.name, cast("Any", param.field_info.annotation)
        validate = TypeAdapter[Any](model).validate_python
        more = given.request_param_name

        async def handle(request: Request) -> Response:
            raw = await request.body()
            value = parse(raw) if _is_json(request.headers.get("content-type")) else None
            try:
                body = validate(value)
            except ValidationError as fault:
                found = [{**error, "loc": ("body", *error["loc"])} for error in fault.errors(include_url=False)]
                raise RequestValidationError(found) from None
            return await self.endpoint(**{name: body}, **({more: request} if more else {}))

        self.handler = handle
        return handle


def _is_json(content_type: str | None) -> bool:
    """Whether a body is meant as JSON: so it is where nothing is said."""
    kind = (content_type or "application/json").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def parse(raw: bytes) -> dict[str, Any]:
    """The object that a body holds. Raises BodyError."""
    odd = False

    def not_json(name: str) -> object:
        nonlocal odd
        odd = True
        return _NOT_JSON

    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=not_json)
    except UnicodeDecodeError:
        raise BodyError("the body is not UTF-8 text") from None
    except json.JSONDecodeError as fault:
        raise BodyError(f"the body is not valid JSON: {fault.msg} at character {fault.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # Python's bound on the digits of an integer
        raise BodyError("the body holds an integer of thousands of digits") from None
    if not isinstance(value, dict):
        raise BodyError("the body must be a JSON object")
    strange = odd or _ESCAPED_SURROGATE.search(text) is not None
    if strange or text.count("[") + text.count("{") > MAX_DEPTH:
        for name, field in value.items():
            _check(name, field, leaves=strange)
    return value


def _check(name: str, field: Any, *, leaves: bool) -> None:
    """Raise BodyError for what is wrong anywhere in a field. `leaves`: look at strings and numbers, not at depth alone."""
    level: list[Any] = [name, field]
    for _ in range(MAX_DEPTH):
        if leaves:
            for item in level:
                if item is _NOT_JSON:
                    raise BodyError("NaN and Infinity are not JSON, send a number", _shown(name))
                if isinstance(item, str) and _SURROGATE.search(item):
                    raise BodyError("the text is not valid Unicode (it holds a lone surrogate)", _shown(name))
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
                if leaves:
                    inner += item  # its names
            elif isinstance(item, list):
                inner += item
        level = inner if leaves else [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> BodyError:
    return BodyError(f"the body nests lists and objects more than {MAX_DEPTH} deep")


def _shown(name: str) -> str | None:
    """A field's name, if it is one that this server knows: no other text is sent back."""
    return name if name in FIELDS else None
