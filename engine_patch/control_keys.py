"""The keys of `/set_internal_state` that are draftdial's own, for both ends of the channel.

SGLang accepts numbers as values and any text as a key, so a policy file travels inside its key.
"""

from __future__ import annotations

import base64
import binascii

from draftdial.controller.errors import UserError
from draftdial.controller.files import sha256_of

PREFIX = "draftdial_"
MODE_KEY = "draftdial_mode"
"""Value: the mode's place among `settings.MODES`, 0 steer, 1 shadow, 2 off."""
FORCE_K_KEY = "draftdial_force_k"
"""Value: a tier, or `NO_FORCED_K`."""
NO_FORCED_K = -1

_POLICY_KEY = "draftdial_policy"


def policy_key(data: bytes) -> str:
    """The key that carries a policy file: `draftdial_policy:<sha256>:<base64>`. Its value is 1."""
    return f"{_POLICY_KEY}:{sha256_of(data)}:{base64.b64encode(data).decode()}"


def is_policy_key(key: str) -> bool:
    """Whether `key` is meant to carry a policy file."""
    return key.startswith(f"{_POLICY_KEY}:")


def policy_bytes(key: str) -> tuple[bytes, str]:
    """The file that `key` carries and its SHA-256.

    Raises:
        UserError: the key was cut or changed on its way.
    """
    _, sha256, text = key.split(":", 2) if key.count(":") >= 2 else (key, "", "")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UserError("policy key: the file is not base64, so it was damaged on its way") from None
    if sha256_of(data) != sha256:
        raise UserError("policy key: the file is not the one of the stated sha256, so it was damaged")
    return data, sha256
