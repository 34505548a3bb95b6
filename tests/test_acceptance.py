"""Banks: joining them, and what a walk with a fixed k reads from hand-made arrays."""

from __future__ import annotations

import numpy as np
import pytest

from draftdial.envs.acceptance import MAX_K, AcceptanceBank, concatenate, walk_statistics


def make_bank(
    domains: dict[str, list[list[int]]], latent_rows: int = 1, decay: float = 0.5
) -> AcceptanceBank:
    """A bank of hand-made arrays whose latents count positions modulo `latent_rows`."""
    arrays = [array for domain in domains.values() for array in domain]
    lengths = np.array([len(array) for array in arrays], np.int32)
    counts = np.array([len(domain) for domain in domains.values()], np.int32)
    return AcceptanceBank(
        accepted=np.concatenate(arrays).astype(np.uint8),
        latent=(np.arange(lengths.sum()) % latent_rows).astype(np.uint16),
        array_start=np.cumsum(lengths, dtype=np.int64) - lengths,
        array_length=lengths,
        domain_first=np.cumsum(counts, dtype=np.int64) - counts,
        domain_count=counts,
        survival=np.tile(decay ** np.arange(MAX_K + 1.0), (latent_rows, 1)),
        domain_names=tuple(domains),
    )


def test_walk_starts_each_round_where_the_last_one_ended() -> None:
    bank = make_bank({"other": [[7, 7]], "walked": [[2, 0, 5, 1, 0, 3], [0, 0, 1]]})
    # k = 2: rounds at 0 (2 accepted) and 3 (1) then 5 (2 of 3); in the second array at 0, 1 and 2.
    walk = walk_statistics(bank, 1, 2)
    assert walk.accept_length == pytest.approx(1 + (2 + 1 + 2 + 0 + 0 + 1) / 6)
    assert walk.conditional == pytest.approx([4 / 6, 2 / 4])
    assert walk.request_accept_length == pytest.approx([1 + 5 / 3, 1 + 1 / 3])
    # k = 1 starts its second round at 2 and its third at 4, so it sees other values.
    assert walk_statistics(bank, 1, 1).request_accept_length == pytest.approx([1 + 3 / 4, 1 + 1 / 3])


def test_depths_that_are_never_reached_have_no_conditional() -> None:
    walk = walk_statistics(make_bank({"hopeless": [[0, 0, 0, 0]]}), 0, 3)
    assert walk.accept_length == 1
    assert walk.conditional[0] == 0
    assert np.isnan(walk.conditional[1:]).all()
    assert walk.predictability == 0


def test_autocorrelation_and_spread_of_alternating_requests() -> None:
    walk = walk_statistics(make_bank({"mixed": [[0, 1, 0] * 200, [1, 0, 0] * 200]}), 0, 1)
    assert walk.autocorrelation[0] == pytest.approx(-1, abs=0.01)
    assert walk.autocorrelation[1] == pytest.approx(1, abs=0.01)
    assert walk.first_depth_sd == 0  # both accept half: less spread than chance would give
    split = walk_statistics(make_bank({"split": [[0] * 100, [1] * 100]}), 0, 1)
    assert split.first_depth_sd == pytest.approx(0.5)


def test_concatenate_keeps_every_array_and_shifts_the_domains() -> None:
    first = make_bank({"a": [[1, 2], [3]], "b": [[4, 5, 6]]}, latent_rows=2)
    second = make_bank({"c": [[7, 0]]}, latent_rows=3, decay=0.25)
    merged, offsets = concatenate([first, second, first])
    assert offsets.tolist() == [0, 2, 3]
    assert merged.domain_names == ("a", "b", "c", "a", "b")
    for bank, offset in zip([first, second, first], offsets, strict=True):
        for domain in range(len(bank.domain_names)):
            theirs, ours = bank.arrays_of(domain), merged.arrays_of(int(offset) + domain)
            assert bank.array_length[theirs].tolist() == merged.array_length[ours].tolist()
            for start, merged_start, length in zip(
                bank.array_start[theirs], merged.array_start[ours], bank.array_length[theirs], strict=True
            ):
                here, there = slice(start, start + length), slice(merged_start, merged_start + length)
                assert np.array_equal(bank.accepted[here], merged.accepted[there])
                assert np.array_equal(bank.survival[bank.latent[here]], merged.survival[merged.latent[there]])


def test_concatenate_shares_equal_survival_tables() -> None:
    bank = make_bank({"a": [[1, 2]]}, latent_rows=2)
    merged, _ = concatenate([bank] * 40)
    assert merged.survival.shape == bank.survival.shape


def test_concatenate_refuses_more_latents_than_16_bits_hold() -> None:
    banks = [make_bank({"a": [[1, 2]]}, latent_rows=40_000, decay=decay) for decay in (0.5, 0.25)]
    with pytest.raises(ValueError, match="80000 latent states"):
        concatenate(banks)
