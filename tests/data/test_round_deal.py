"""Batches dealt in rounds, in which workers die."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from paceline.data.round_deal import Left, RoundDeal

WORKERS, NUMBERS = 4, 100


def hand_out(deal, *rounds, begun=None):
    for number in rounds:
        deal.hand_out(number)
    deal.begun = rounds[-1] + 1 if begun is None else begun


def test_members_get_the_next_batches_in_the_order_of_their_ids():
    deal = RoundDeal(1, 3)
    deal.begin(7, 0, NUMBERS)
    assert [deal.places(7), deal.places(8)] == [[0, 1, 2], [3, 4, 5]]
    assert (deal.place(8), deal.places(8)[0]) == (4, 3)


def test_what_a_dead_worker_left_comes_first():
    deal = RoundDeal(2, 3)
    deal.begin(0, 0, NUMBERS)
    hand_out(deal, 0, 1)
    deal.meet([0, 2])  # neither of worker 1's two batches is in a mean
    assert [deal.places(2), deal.places(3), deal.places(4)] == [[1, 4], [6, 7], [8, 9]]


def test_a_batch_that_was_fetched_ahead_is_dealt_again_too():
    deal = RoundDeal(0, 2)
    deal.begin(0, 0, NUMBERS)
    hand_out(deal, 0, 1, begun=1)
    deal.meet([0])
    assert (deal.left(2), deal.left(3), deal.left(1)) == (Left(4, [1, 3]), Left(4, [3]), Left(4, [1, 2, 3]))
    assert [deal.places(2), deal.places(3), deal.places(4)] == [[1], [3], [4]]


def test_a_second_death_before_the_round_that_was_fetched_ahead():
    deal = RoundDeal(0, 3)
    deal.begin(0, 0, NUMBERS)
    hand_out(deal, 0, 1, begun=1)
    deal.meet([0, 1])
    hand_out(deal, 2, begun=2)
    assert deal.places(2) == [2, 5]
    deal.meet([0])  # of rounds 0 and 1; worker 1 had batches 4 and 5 in the second and third
    assert [deal.places(3), deal.places(4), deal.places(5)] == [[4], [5], [6]]


def test_a_newcomer_has_no_batch_in_a_round_that_was_dealt_before():
    deal, newcomer = RoundDeal(0, 3), RoundDeal(1, 3)
    deal.begin(0, 0, NUMBERS)
    hand_out(deal, 0, 1, begun=1)
    deal.meet([0, 2])  # worker 1's batches, 1 and 4, are dealt again
    newcomer.enter(deal.let_in([0, 1, 2]))
    assert newcomer.places(1) == deal.places(1) == [3, 5]
    assert newcomer.place(1) == NUMBERS
    hand_out(newcomer, 1)
    assert [newcomer.places(2), newcomer.places(3)] == [[1, 4, 6], [7, 8, 9]]
    assert newcomer.place(3) == 8


def test_a_newcomers_first_round_exists_even_if_only_a_dead_worker_had_a_batch_in_it():
    deal, newcomer = RoundDeal(1, 2), RoundDeal(0, 2)
    deal.begin(0, 0, 3)
    hand_out(deal, 0, 1, begun=2)
    deal.meet([0, 1], rounds=1)
    deal.meet([1], rounds=1)  # worker 0 had the last batch, and this worker none
    newcomer.enter(deal.let_in([0, 1]))
    assert not newcomer.is_over(1, range(3).__contains__)
    assert newcomer.place(1) == 3
    assert not deal.is_over(2, range(3).__contains__)
    assert [deal.places(2), deal.is_over(3, range(3).__contains__)] == [[2, 4], True]


def test_a_stream_does_not_go_back():
    deal = RoundDeal(0, 2)
    deal.begin(0, 0, NUMBERS, can_repeat=False)
    hand_out(deal, 0)
    deal.meet([0])
    assert deal.places(1) == [2]


def test_what_a_dead_worker_left_in_the_epoch_before_comes_first():
    deal = RoundDeal(0, 2)
    deal.begin(0, 0, 3)
    hand_out(deal, 0, 1)
    assert deal.unmet(lambda place: place < 3) == [0, 1, 2]
    deal.begin(2, 1, 3)
    hand_out(deal, 2)
    deal.meet([0])  # worker 1 had batch 1 in each epoch, and none in round 1
    assert [deal.places(number) for number in (3, 4, 5)] == [[-2], [1], [2]]
    assert deal.left(3) == Left(5, [1, 4])


def test_what_is_lost_in_an_epochs_last_step_comes_first_in_the_next():
    deal = RoundDeal(0, 2)
    deal.begin(0, 0, 3)
    hand_out(deal, 0, 1)
    deal.meet([0])  # worker 1 had batch 1, and none in round 1
    assert deal.left(2) == Left(3, [1])
    assert deal.unmet(lambda place: place < 3) == [1]
    deal.begin(2, 1, 3)
    assert deal.left(2) == Left(3, [1])
    assert [deal.places(number) for number in (2, 3, 4)] == [[-2], [0], [1]]


def test_a_loop_that_leaves_an_epoch_leaves_what_is_lost_in_it():
    deal = RoundDeal(0, 2)
    deal.begin(0, 0, 4)
    hand_out(deal, 0)
    deal.meet([0])
    assert deal.unmet(lambda place: place < 4) == []
    deal.begin(2, 1, 4)
    assert deal.places(2) == [0]


def test_a_mean_that_was_sent_earlier_contains_earlier_rounds_only():
    deal = RoundDeal(0, 2)
    deal.begin(0, 0, NUMBERS)
    hand_out(deal, 0, 1, 2)
    deal.meet([0, 1], rounds=2)
    deal.meet([0], rounds=2)
    assert deal.places(3) == [5]


def test_an_epoch_ends_once_all_members_are_alive_or_in_a_mean():
    asked = []
    survivors = SimpleNamespace(living=lambda: asked.append(None) or [0], kept=lambda worker: 0)
    deal = RoundDeal(0, 2, survivors=survivors)
    deal.begin(0, 0, NUMBERS)
    hand_out(deal, 0)
    deal.settle()
    assert deal.places(1) == [1]
    hand_out(deal, 1)
    deal.meet([0])
    deal.settle()
    assert len(asked) == 1


def test_what_others_have_of_a_dead_workers_steps_is_not_dealt_again():
    survivors = SimpleNamespace(living=lambda: [0], kept=lambda worker: [3, 2][worker])
    deal = RoundDeal(0, 2, survivors=survivors)
    deal.begin(0, 0, NUMBERS)
    hand_out(deal, 0, 1, 2)
    deal.settle()
    assert [deal.places(number) for number in (3, 4)] == [[5], [6]]
    assert deal.met == 3


rounds = st.tuples(st.booleans(), st.sets(st.integers(0, WORKERS - 1)))


@given(st.integers(1, 30), st.lists(rounds), st.integers(0, 3))
def test_each_batch_is_in_one_mean_whoever_dies_whenever(num_batches, plan, place):
    """In each round perhaps workers die, and perhaps the living ones meet; in the epoch's last one they do."""
    deals = {worker: RoundDeal(worker, WORKERS, Left(place, [])) for worker in range(WORKERS)}
    for deal in deals.values():
        deal.begin(0, 0, NUMBERS)
    trained, unmet, plan = [], [], [*plan]
    for number in range(1000):
        first, *_ = deals.values()
        assert all(deal.places(number) == first.places(number) for deal in deals.values())
        if first.is_over(number, num_batches.__gt__):
            break
        meets, dying = plan.pop(0) if plan else (True, set())
        for worker, deal in deals.items():
            assert deal.place(number) == first.places(number)[list(first.members).index(worker)]
            unmet.append((worker, deal.place(number)))
            hand_out(deal, number)
        deals = {worker: deal for worker, deal in deals.items() if worker not in dying} or {min(deals): first}
        if meets or not plan or first.is_over(number + 1, num_batches.__gt__):
            trained += [batch for worker, batch in unmet if worker in deals and batch < num_batches]
            unmet = []
            for deal in deals.values():
                deal.meet(list(deals))
    trained += [batch for worker, batch in unmet if worker in deals and batch < num_batches]
    assert sorted(trained) == list(range(place, num_batches))
