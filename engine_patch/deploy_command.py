"""`draftdial deploy POLICY URL`: put a policy file into a running server, on all ranks or on none."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from draftdial.controller.files import sha256_of
from draftdial.controller.policy_file import load_policy, read
from draftdial.engine_patch.client import (
    Server,
    ServerRefused,
    add_server_arguments,
    change_everywhere,
    run_against_server,
    where,
)
from draftdial.engine_patch.control_keys import policy_key


def add_parser(subparsers: Any) -> None:
    """Add `deploy` to the commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "deploy", help="put a policy file into a running server"
    )
    parser.add_argument("policy", metavar="POLICY", type=Path, help="a policy file")
    add_server_arguments(parser)
    parser.set_defaults(run=lambda args: run_against_server(args, _deploy))


def _deploy(server: Server, args: argparse.Namespace) -> None:
    file = read(args.policy)
    load_policy(file)
    replicas = change_everywhere(server, policy_key(file.data), 1)
    for i, replica in enumerate(replicas):
        if replica.get("policy_sha256") != sha256_of(file.data):
            raise ServerRefused(
                f"{where(i, replicas)}runs policy {replica.get('policy_id')} although it answered that it "
                f"took {file.policy_id}: another deploy came in between"
            )
    if args.json:
        print(json.dumps(replicas))
        return
    everywhere = f" on {len(replicas)} replicas" if len(replicas) > 1 else ""
    print(f"{server.url}: policy {file.policy_id} ({file.card['name']}) is in place{everywhere}")
