"""Files that appear whole or not at all, and short names for them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


def atomic_write(path: str | Path, content: bytes | str) -> None:
    """Write `content` beside `path` and rename it there, so that no reader sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def short_names(paths: Sequence[Path]) -> list[str]:
    """Each path's stem, with as many folders before it as tell it from the others: `a/policy`, `b/policy`.

    Names are alike only where paths are, their endings apart.
    """
    parts = [path.absolute().with_suffix("").parts for path in paths]

    def short(own: tuple[str, ...]) -> str:
        tails = (own[-length:] for length in range(1, len(own) + 1))
        known = (tail for tail in tails if sum(other[-len(tail) :] == tail for other in parts) == 1)
        return "/".join(next(known, own[-1:]))

    return [short(own) for own in parts]


def sha256_of(data: bytes) -> str:
    """Hexadecimal SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()
