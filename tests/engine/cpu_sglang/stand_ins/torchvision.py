"""Lets modules that mention torchvision be imported: no wheel of it fits the CPU build of torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0.0"
__path__: list[str] = []


class InterpolationMode(Enum):
    """Read as constants while modules load."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "InterpolationMode":
        return InterpolationMode

    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} does not run on this stand-in for torchvision")

    return missing


__getattr__ = _attribute


class _Submodules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("torchvision.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _attribute


sys.meta_path.append(_Submodules())
