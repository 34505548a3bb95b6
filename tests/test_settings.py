"""What the plugin reads from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftdial.controller.errors import UserError
from draftdial.engine_patch.settings import Settings


def test_without_a_policy_there_are_no_settings() -> None:
    assert Settings.from_environment({"DRAFTDIAL_MODE": "no such mode"}) is None
    assert Settings.from_environment({"DRAFTDIAL_POLICY": ""}) is None


def test_a_policy_is_enough() -> None:
    assert Settings.from_environment({"DRAFTDIAL_POLICY": "/p"}) == Settings(
        Path("/p"), "steer", True, None, None, 64 << 20, ""
    )


def test_every_variable_is_read() -> None:
    settings = Settings.from_environment(
        {
            "DRAFTDIAL_POLICY": "/p",
            "DRAFTDIAL_MODE": "shadow",
            "DRAFTDIAL_START": "warn",
            "DRAFTDIAL_FORCE_K": "0",
            "DRAFTDIAL_LOG": "/l",
            "DRAFTDIAL_LOG_MB": "5",
            "DRAFTDIAL_INACTIVE": "because",
        }
    )
    assert settings == Settings(Path("/p"), "shadow", False, 0, Path("/l"), 5 << 20, "because")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("DRAFTDIAL_POLICY", "p", "an absolute path"),
        ("DRAFTDIAL_MODE", "on", "steer, shadow, off"),
        ("DRAFTDIAL_START", "lenient", "strict, warn"),
        ("DRAFTDIAL_FORCE_K", "-1", "a whole number from 0 to 255"),
        ("DRAFTDIAL_LOG_MB", "3", "a whole number from 4 to 1048576"),
        ("DRAFTDIAL_LOG_MB", "1e3", "a whole number from 4 to 1048576"),
        ("DRAFTDIAL_LOG_MB", "1048577", "a whole number from 4 to 1048576"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str, allowed: str) -> None:
    with pytest.raises(UserError, match=f"{name}: found '{value}', allowed: {allowed}"):
        Settings.from_environment({"DRAFTDIAL_POLICY": "/p", name: value})


def test_a_number_of_thousands_of_digits_is_one_short_line() -> None:
    with pytest.raises(UserError, match="DRAFTDIAL_LOG_MB: found '9999") as error:
        Settings.from_environment({"DRAFTDIAL_POLICY": "/p", "DRAFTDIAL_LOG_MB": "9" * 5000})
    assert len(str(error.value)) < 150
