"""Prompts from JSONL files, as token ids of a model's chat format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftdial.controller.errors import UserError


@dataclass(frozen=True)
class ChatPrompt:
    """One prompt, ready for a model."""

    id: str
    domain: str
    ids: tuple[int, ...]


def read_prompts(path: Path, model: Path) -> list[ChatPrompt]:
    """Every prompt of a file, one JSON object a line with `id`, `category`, and `turns` or `ids`.

    `turns` holds user turns, of which the first is asked, in the chat template of the tokenizer in the
    folder `model`; `ids` holds token ids, taken as they are, at least 2. Raises UserError naming file, line
    and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts {path}: cannot read it as text ({error})") from None
    encode: Callable[[str], list[int]] | None = None
    prompts = []
    for number, line in enumerate(lines, 1):
        where = f"prompts {path} line {number}"
        record = _record(line, where)
        if "ids" not in record:
            encode = encode or chat_encoder(model)
            record["ids"] = encode(_first_turn(record, where))
        ids = record["ids"]
        if not (isinstance(ids, list) and len(ids) >= 2 and all(type(i) is int and i >= 0 for i in ids)):
            raise UserError(f"{where}, field ids: expected a list of two or more token ids")
        prompts.append(ChatPrompt(str(record["id"]), str(record["category"]), tuple(ids)))
    if not prompts:
        raise UserError(f"prompts {path}: found no line; allowed: one JSON object or more")
    return prompts


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: not JSON") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object with id, category and turns or ids")
    for field in ("id", "category"):
        if not isinstance(record.get(field), str):
            raise UserError(f"{where}, field {field}: expected a string")
    return record


def _first_turn(record: dict[str, Any], where: str) -> str:
    turns = record.get("turns")
    if not (isinstance(turns, list) and turns and isinstance(turns[0], str)):
        raise UserError(f"{where}, field turns: expected a list of strings, not empty")
    first: str = turns[0]
    return first


def chat_encoder(model: Path) -> Callable[[str], list[int]]:
    """What makes token ids of one user turn, up to where the assistant speaks.

    `model` is a Hugging Face folder; raises UserError where it has no tokenizer with a chat template.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        source = settings.get("chat_template") or (model / "chat_template.jinja").read_text(encoding="utf-8")
    except Exception as error:  # tokenizers raises bare Exception for a file that is missing or malformed
        raise UserError(f"{model}: no tokenizer with a chat template ({error})") from None
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    named = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token")}

    def encode(turn: str) -> list[int]:
        messages = [{"role": "user", "content": turn}]
        text = template.render(messages=messages, add_generation_prompt=True, **named)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _text(token: Any) -> str:
    """A special token, which some files write as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
