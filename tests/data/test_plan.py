import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.plan import BatchPlan, Dynamic, Fixed, Skewed, partition_registry
from paceline.data.sources import ABSENT, END, BatchClaims
from paceline.errors import UsageError

WORKERS = st.sampled_from([1, 2, 3, 5, 8])
PARTITIONS = st.sampled_from([Dynamic(), Fixed(), Skewed(), Skewed(alpha=0.05), Skewed(alpha=100.0)])


@st.composite
def plans(draw, partitions=PARTITIONS):
    num_workers = draw(WORKERS)
    num_samples = draw(st.integers(num_workers, 70))
    return BatchPlan(
        num_samples=num_samples,
        batch_size=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 2**63)),
        shuffle=draw(st.booleans()),
        partition=draw(partitions),
        num_workers=num_workers,
        labels=torch.arange(num_samples) % draw(st.sampled_from([1, 3, 10])),
    )


def samples(plan, numbers):
    return sorted(int(index) for number in numbers for index in plan.indices(number))


@given(plans(), st.integers(0, 3))
def test_an_epoch_is_each_sample_once_in_total(plan, epoch):
    first = epoch * plan.batches_per_epoch
    numbers = range(first, first + plan.batches_per_epoch)
    assert samples(plan, numbers) == list(range(plan.num_samples))
    assert all(1 <= len(plan.indices(number)) <= plan.batch_size for number in numbers)
    assert all(plan.size(number) == len(plan.indices(number)) for number in numbers)


@given(plans(), st.integers(1, 3))
def test_lockstep_rounds_take_every_batch_once(plan, epochs):
    taken = []
    for worker_id in range(plan.num_workers):
        claims = BatchClaims(plan, worker_id=worker_id, lockstep=True, counter=int, max_epochs=epochs)
        taken.append(list(iter(claims.next, END)))
    assert {len(one) for one in taken} == {epochs * plan.rounds_per_epoch()}
    numbers = [number for one in taken for number in one if number != ABSENT]
    assert sorted(numbers) == list(range(epochs * plan.batches_per_epoch))
    assert any(one[-1] != ABSENT for one in taken)


@given(plans(partitions=st.sampled_from([Fixed(), Skewed(), Skewed(alpha=0.01)])))
def test_owned_parts_are_disjoint_stable_and_never_empty(plan):
    parts = [samples(plan, plan.worker_batches(worker_id, 0)) for worker_id in range(plan.num_workers)]
    assert sorted(index for part in parts for index in part) == list(range(plan.num_samples))
    assert min(map(len, parts)) >= 1
    if plan.partition == Fixed():
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for worker_id, part in enumerate(parts):
        assert samples(plan, plan.worker_batches(worker_id, 5)) == part


@given(WORKERS, st.integers(0, 10))
def test_dynamic_order_depends_on_seed_and_epoch_only(num_workers, epoch):
    one = BatchPlan(num_samples=50, batch_size=7, seed=3)
    many = BatchPlan(num_samples=50, batch_size=7, seed=3, num_workers=num_workers)
    assert torch.equal(one.order(epoch), many.order(epoch))
    assert not torch.equal(one.order(epoch), one.order(epoch + 1))
    assert not torch.equal(one.order(epoch), BatchPlan(num_samples=50, batch_size=7, seed=4).order(epoch))


def test_epoch_and_seed_do_not_mix():
    orders = [BatchPlan(num_samples=50, batch_size=7, seed=seed).order(epoch) for seed, epoch in ((0, 1), (1, 0))]
    assert not torch.equal(*orders)


@given(plans())
def test_a_copy_in_another_process_gives_the_same_batches(plan):
    copy = pickle.loads(pickle.dumps(plan))
    for number in (0, 2 * plan.batches_per_epoch, plan.batches_per_epoch - 1, 1):
        assert torch.equal(plan.indices(number), copy.indices(number))


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    BatchPlan(num_samples=9, batch_size=2, partition=Fixed(), num_workers=3).order(1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("partition", [Dynamic(), Fixed()])
def test_drop_last_leaves_only_full_batches(partition):
    plan = BatchPlan(num_samples=23, batch_size=4, drop_last=True, partition=partition, num_workers=3)
    sizes = {len(plan.indices(number)) for number in range(plan.batches_per_epoch)}
    assert sizes == {4}
    assert plan.batches_per_epoch == 5  # dynamic: 23 // 4; fixed: parts of 8, 8 and 7 samples
    taken = samples(plan, range(plan.batches_per_epoch))
    assert len(set(taken)) == len(taken)


def test_fractional_epochs():
    plan = BatchPlan(num_samples=100, batch_size=10)
    assert [plan.num_batches_for(epochs) for epochs in (0.5, 0.51, 1, 0.1 + 0.2, 2.0, 0.001)] == [5, 6, 10, 3, 20, 1]


def test_skew_is_stronger_for_small_alpha():
    labels = torch.arange(1000) % 10

    def largest_share(alpha):
        plan = BatchPlan(
            num_samples=1000, batch_size=10, partition=Skewed(alpha=alpha), num_workers=5, labels=labels, seed=1
        )
        shares = []
        for worker_id in range(5):
            owned = torch.cat([plan.indices(number) for number in plan.worker_batches(worker_id, 0)])
            shares.append(float(labels[owned].bincount(minlength=10).max() / len(owned)))
        return sum(shares) / 5

    assert largest_share(0.05) > 0.3 > largest_share(100.0)


def test_partitions_are_written_as_specs():
    assert partition_registry.build("skewed(alpha=1)") == Skewed(alpha=1.0)
    assert partition_registry.spec(Fixed()) == "fixed"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_samples": 0}, "num_samples must be 1"),
        ({"batch_size": 0}, "batch_size must be 1"),
        ({"num_workers": 0}, "num_workers must be 1"),
        ({"seed": -1}, "seed must be 0"),
        ({"batch_size": 20, "drop_last": True}, "without a batch"),
        ({"partition": Fixed(), "num_workers": 11}, "use fewer"),
        ({"partition": Skewed()}, "one class label per sample"),
    ],
)
def test_impossible_plans_are_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        BatchPlan(**{"num_samples": 10, "batch_size": 2, **arguments})


def test_misuse_is_refused():
    with pytest.raises(UsageError, match="above 0"):
        partition_registry.build("skewed(alpha=0)")
    with pytest.raises(UsageError, match="no worker owns"):
        BatchPlan(num_samples=10, batch_size=2).worker_batches(0, 0)
    plan = BatchPlan(num_samples=10, batch_size=2, partition=Fixed(), num_workers=2)
    with pytest.raises(UsageError, match="worker_id 2"):
        plan.worker_batches(2, 0)
