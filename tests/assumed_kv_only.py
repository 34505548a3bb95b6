"""A profile with times of off mode `kv-only` that nobody has measured: what if they were these?"""

from __future__ import annotations

from collections.abc import Sequence

from draftdial.controller.cost_profile import CostProfile
from draftdial.controller.profile_document import KV_ONLY_PREFILL, KV_ONLY_ROW


def assumed_kv_only(profile: CostProfile, name: str, extra_ms: float, extra_share: float) -> CostProfile:
    """`profile` with a row in which a round takes off-skip's time and `max(extra_ms, extra_share * time)`.

    Every cell is marked as inferred, and the provenance says that it is an assumption.

    Args:
        profile: Has no such row.
        name: Of the new profile.
        extra_ms: What a round takes more than under `skip`, at least.
        extra_share: The same as a share of it.
    """
    document = profile.to_document()
    formula = f"off-skip + max({extra_ms:g} ms, {extra_share:g} of it)"
    names = [row["row"] for row in document["rows"]]
    place = names.index("off-skip")
    cells = [
        {
            "batch": cell["batch"],
            "context_tokens": cell["context_tokens"],
            "round_ms": [round(time + max(extra_ms, extra_share * time), 4) for time in cell["round_ms"]],
            "inferred": True,
            "note": f"assumed: {formula}",
        }
        for cell in document["rows"][place]["cells"]
    ]
    document["rows"].insert(place + 1, {"row": KV_ONLY_ROW, "cells": cells})
    document["name"] = name
    document["description"] = f"{profile.name} with an ASSUMED {KV_ONLY_ROW}. {document['description']}"
    document["provenance"].append(
        {
            "covers": [KV_ONLY_ROW],
            "source": "an assumption",
            "measured": "Nothing.",
            "inferred": f"All: {formula}.",
        }
    )
    return CostProfile.from_document(document, name)


def with_kv_only_prefill(profile: CostProfile, knots_ms: Sequence[Sequence[float]]) -> CostProfile:
    """`profile`, which has a kv-only row, with these `(tokens, ms)` for prefills that leave the draft out."""
    document = profile.to_document()
    document["prefill"][KV_ONLY_PREFILL] = [list(knot) for knot in knots_ms]
    return CostProfile.from_document(document, profile.name)
