"""Lets modules that define Triton kernels be imported where nothing will launch one.

Every name of `triton` and its submodules is the same do-nothing object; launching a kernel raises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "3.0.0"
__path__: list[str] = []  # makes `import triton.language` look for a submodule

# Torch would take it for the real one where modules of SGLang compile as they are imported.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


class _Anything:
    """Stands for a decorator, a base class, a type or a constant."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not kwargs
        return _Kernel() if decorates else self

    def __getattr__(self, name: str) -> Any:
        return _attribute(name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


class _Kernel(_Anything):
    """What a decorated function becomes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("Triton kernels do not run on this stand-in")

    def __getitem__(self, grid: Any) -> Any:
        raise NotImplementedError("Triton kernels do not run on this stand-in")


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "active":  # the driver: its users take an error for "no GPU"
        raise RuntimeError("this stand-in for Triton has no driver")
    return _Anything()


__getattr__ = _attribute


def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """`@jit` and `@jit(...)`."""
    return _Kernel() if function is not None else _Anything()


def autotune(*_args: Any, **_options: Any) -> Callable[[Any], Any]:
    """Leaves the kernel as it is."""
    return lambda kernel: kernel


heuristics = autotune


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


class Config:
    """Tuning options of a kernel; some callers read them back."""

    def __init__(self, kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        self.kwargs = kwargs or {}
        self.__dict__.update(options)


class _Submodules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("triton.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _attribute


sys.meta_path.append(_Submodules())
