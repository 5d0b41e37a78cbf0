"""Which workers may go on without others that may be alive."""

from paceline.transport.quorum import Quorum

ALL = (0, 1, 2, 3, 4)


def test_workers_that_have_ended_do_not_vote():
    assert Quorum([ALL]).missing({3, 4}, alive=ALL) == [0, 1, 2]
    assert Quorum([ALL]).missing({3, 4}, alive={2, 3, 4}) == []


def test_a_majority_of_a_view_that_all_have_begun_is_enough():
    quorum = Quorum([ALL])
    quorum.begin((0, 1, 2))
    quorum.has_begun((0, 1, 2))
    assert quorum.missing({1, 2}, alive=ALL) == []


def test_until_all_have_begun_a_view_the_one_before_counts_too():
    """Those that have not begun it may go on with workers that are not in it, and those that have, without them."""
    quorum = Quorum([ALL])
    quorum.begin((0, 1, 2))
    assert quorum.missing({1, 2}, alive=ALL) == [0, 3, 4]
    assert quorum.missing({2, 3, 4}, alive=ALL) == [0, 1]
    assert quorum.missing({0, 1, 3}, alive=ALL) == []
