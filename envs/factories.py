"""Objects from the names and parameters a user wrote."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

from draftdial.controller.errors import UserError

_T = TypeVar("_T")


def build(factory: Callable[..., _T], parameters: Mapping[str, object], where: str) -> _T:
    """Call `factory` with parameters a user wrote; UserError lists what is allowed if they do not fit."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**parameters)
    except TypeError as error:
        raise UserError(f"{where}: {error}; allowed: {', '.join(signature.parameters)}") from None
    return factory(**parameters)


def pick(table: Mapping[str, _T], name: str, what: str) -> _T:
    if name not in table:
        raise UserError(f"{what} {name!r} is unknown; allowed: {', '.join(table)}")
    return table[name]
