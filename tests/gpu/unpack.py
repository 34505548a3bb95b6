"""Writes the benches that a file of docs/results holds to FOLDER/NAME/bench.json: unpack.py FILE FOLDER.

`draftdial validate-sim` and `equal_host.py` read them, in the folder that holds INPUT's traces (README.md).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def document_of(file: str) -> dict[str, Any]:
    """The JSON object in `file`; without one it is the end, with one line."""
    try:
        document = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{file}: not a file of JSON: {error}")
    return document if isinstance(document, dict) else {}


def main(file: str, folder: str) -> None:
    benches = document_of(file).get("benches")
    if not benches:
        sys.exit(f"{file}: holds no `benches`, only what was made of them")
    for name, bench in benches.items():
        path = Path(folder, name, "bench.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(bench))
        print(path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: unpack.py FILE FOLDER")
    main(*sys.argv[1:])
