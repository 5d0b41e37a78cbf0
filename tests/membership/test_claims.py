"""Which batch is next, where the join point counts, where it is gone, and where its count makes no sense."""

from types import SimpleNamespace

import pytest

from paceline.membership.claims import JoinedClaims
from paceline.membership.join_point import JoinPointLostError


def claims_of(*counts, alive=(0, 1)):
    """Claims of worker 0 of 2, whose join point says so in turn; an exception is raised."""
    said, notes = iter(counts), []

    def add(key, amount):
        count = next(said)
        if isinstance(count, Exception):
            raise count
        return count

    mailbox = SimpleNamespace(peers=lambda: {*alive} - {0})
    return JoinedClaims(SimpleNamespace(address="h:1", add=add, lost=False), mailbox, 0, 2, notes), notes


def test_the_numbers_of_a_claim_are_handed_out_one_by_one():
    claims, notes = claims_of(4, 1, 12)
    assert [claims.claim(0) for _ in range(8)] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert notes == []


@pytest.mark.parametrize("said", [JoinPointLostError("h:1"), 7, 4, 0, -3000])
def test_a_count_that_is_lost_or_goes_back_is_not_asked_for_again(said):
    """-3,000, and every worker's next batch had a negative number."""
    claims, notes = claims_of(4, 1, said)
    assert [claims.claim(0) for _ in range(7)] == [0, 1, 2, 3, 4, 6, 8], "then batch n is worker n mod 2's"
    assert [claims.claim(1) for _ in range(3)] == [0, 2, 4]
    assert notes == ["The join point is gone: from batch 4 of epoch 1 on, batches were dealt out by worker ids."]


def test_a_count_that_begins_below_zero_begins_at_zero():
    claims, _ = claims_of(-5, alive=(0,))
    assert [claims.claim(0) for _ in range(3)] == [0, 1, 2]


def test_every_epoch_has_a_count_of_its_own():
    claims, _ = claims_of(8, 4, 2)
    assert [claims.claim(epoch) for epoch in (0, 0, 1, 1)] == [4, 5, 0, 1], (
        "what is left of a claim ends with its epoch"
    )


def test_late_workers_begin_in_the_newest_epoch():
    assert claims_of(3)[0].newest() == 2
    assert claims_of(0)[0].newest() == claims_of(JoinPointLostError("h:1"))[0].newest() == 0
