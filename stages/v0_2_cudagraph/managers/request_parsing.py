"""From a request's bytes to a checked struct; every way to fail is an `ApiError` 400 that names the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from .. import LATER_PARAMETERS, STAGE, LaterParameter
from ..support.http_errors import ApiError, bad_request

StructT = TypeVar("StructT", bound=msgspec.Struct)

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
PATH = re.compile(r" - at `(?:key in )?(?:`?\$)?\.?(?P<path>[^`]*)`(?: in `\$\.?(?P<parent>[^`]*)`)?$")
NAMED_FIELD = re.compile(r"(?:required|unknown) field `(?P<name>[^`]*)`")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``."""
    try:
        content = msgspec.json.decode(body)
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None
    except (msgspec.DecodeError, ValueError) as error:
        hint = " (a lone surrogate is no character)" if SURROGATE.search(body) else ""
        raise bad_request(f"The body is not valid JSON in UTF-8: {error}{hint}.") from None
    if not isinstance(content, dict):
        raise bad_request("The body must be a JSON object.")
    return content


def refuse_later_parameters(
    content: dict[str, Any], where: str = "", table: dict[str, LaterParameter] = LATER_PARAMETERS
) -> None:
    """Drop parameters of later stages at their neutral values; raise if one asks for something."""
    for name in table.keys() & content.keys():
        value, later = content.pop(name), table[name]
        if not any(_same(value, neutral) for neutral in later.neutral):
            added = "in no stage" if later.added_in == "no stage" else f"from stage {later.added_in} on"
            raise bad_request(
                f"{where}{name} is not supported by stage {STAGE}; it is {added}.", where + name
            )


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells true from 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def convert(content: dict[str, Any], struct: type[StructT]) -> StructT:
    """``content`` as ``struct``, types taken strictly."""
    try:
        return msgspec.convert(content, struct, str_keys=True)
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None


def _explain(error: str) -> ApiError:
    """msgspec's message (``Expected `int`, got `str` - at `$.prompt[0]```) with the field in front."""
    named = NAMED_FIELD.search(error)
    path = PATH.search(error)
    where = ""
    if path is not None:
        where = path["parent"] if path["parent"] is not None else path["path"]
        where = where.removeprefix("$").removeprefix(".")
        error = error[: path.start()]
    if named is not None:
        where = f"{where}.{named['name']}" if where else named["name"]
        return bad_request(error + ".", where)
    return bad_request(f"{where}: {error}." if where else f"{error}.", where or None)
