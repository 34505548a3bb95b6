"""`draftdial export-rule KIND`: a rule as a policy file, so that it can be compared and deployed like one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from draftdial.controller.cost_profile import SPECULATIVE_OFF_MODES, CostProfile
from draftdial.controller.errors import UserError
from draftdial.controller.policy_export import rule_file
from draftdial.controller.policy_file import write
from draftdial.controller.rule_cards import FIELDS, rule_from_card
from draftdial.controller.rules import Threshold


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `export-rule` to the commands."""
    parser = subparsers.add_parser("export-rule", help="write a rule to a policy file")
    parser.add_argument("kind", choices=tuple(FIELDS), help="what decides k")
    parser.add_argument("--k", type=int, help="draft tokens (fixed, threshold)")
    parser.add_argument("--batch", type=int, help="speculate while at most this many run (threshold)")
    parser.add_argument("--profile", default="h200-llama3-8b", help="cost profile: a name or a .json file")
    parser.add_argument(
        "--off-mode", choices=SPECULATIVE_OFF_MODES, default="warm", help="what k = 0 does for the draft"
    )
    parser.add_argument("--out", type=Path, help="file to write; missing folders are made (NAME.safetensors)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file and say so; 0, or a `UserError` for a value that is out of range."""
    profile = CostProfile.load(args.profile)
    known = [mode for mode in SPECULATIVE_OFF_MODES if mode in profile.off_modes]
    if args.off_mode not in known:
        raise UserError(
            f"export-rule {args.kind}: --off-mode: found {args.off_mode}, allowed: {', '.join(known)} "
            f"({profile.name}); a server with --off-mode kv-only takes a policy made for warm, too"
        )
    card = {"kind": args.kind, **_parameters(args, profile)}
    rule = rule_from_card(card, profile.tiers, profile, args.off_mode)
    # Should a rule ever fail in a server, that server stops speculating, unless the rule is that simple.
    fallback = rule if isinstance(rule, Threshold) else Threshold(profile.tiers, k=0, batch=0)
    name = "-".join([args.kind, *(f"{key}{value}" for key, value in card.items() if key != "kind")])
    file = rule_file(rule, profile, args.off_mode, name=name, fallback=fallback)
    path = args.out or Path(f"{name}.safetensors")
    try:
        write(path, file)
    except OSError as error:
        raise UserError(
            f"--out: found {path}, allowed: a file that can be written ({error.strerror})"
        ) from None
    print(f"{path}: {name} for {profile.name}, id {file.policy_id}")
    return 0


def _parameters(args: argparse.Namespace, profile: CostProfile) -> dict[str, Any]:
    """The values that this kind of rule takes, all of them given and in range."""
    parameters: dict[str, Any] = {}
    for field, allowed in (("k", profile.tiers), ("batch", range(profile.max_running + 1))):
        value, taken = getattr(args, field), field in FIELDS[args.kind]
        choices = ", ".join(map(str, allowed)) if field == "k" else f"0 to {profile.max_running}"
        if taken and value not in allowed:
            found = "none" if value is None else value
            raise UserError(
                f"export-rule {args.kind}: --{field}: found {found}, allowed: {choices} ({profile.name})"
            )
        if not taken and value is not None:
            takers = " and ".join(kind for kind, fields in FIELDS.items() if field in fields)
            raise UserError(f"export-rule {args.kind}: --{field}: found {value}, allowed: only for {takers}")
        if taken:
            parameters[field] = value
    return parameters
