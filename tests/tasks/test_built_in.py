import pytest
import torch

from paceline.data.plan import BatchPlan
from paceline.tasks import BUILT_IN, fetch, load_task
from real_data import needs_cifar10, needs_mnist


def train(task, *, steps=None, epochs=None, seed=0):
    torch.manual_seed(seed)
    model = task.model()
    train_set, test_set = task.load()
    plan = BatchPlan(num_samples=len(train_set), batch_size=task.batch_size, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate)
    for number in range(steps or plan.num_batches_for(epochs)):
        inputs, targets = fetch(train_set, plan.indices(number))
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    return task.evaluate(model, test_set)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("digits-mlp", 8970),
        ("mnist-mlp", 134_794),
        ("mnist-cnn", 27_354),
        ("cifar10-cnn", 79_770),
        ("vgg-small", 682_282),
        ("clicks", 16_000_001),
    ],
)
def test_sizes(name, num_parameters):
    task = load_task(name)
    assert task.name == name
    model = task.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert not list(model.buffers()), "racing workers would leave buffers ambiguous"


def test_every_built_in_has_sensible_defaults():
    for name in BUILT_IN:
        task = load_task(name)
        assert task.batch_size >= 1
        assert task.learning_rate > 0
        assert task.epochs > 0


def test_digits_are_split_by_class_and_scaled():
    train_set, test_set = load_task("digits-mlp").load()
    assert (len(train_set), len(test_set)) == (1437, 360)
    inputs, targets = train_set.tensors
    assert (float(inputs.min()), float(inputs.max())) == (0.0, 1.0)
    for part, size in ((train_set, 1437), (test_set, 360)):
        assert (part.tensors[1].bincount() / size - targets.bincount() / 1437).abs().max() < 0.005


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_digits_mlp_reaches_96_percent_with_plain_sgd(seed):
    task = load_task("digits-mlp")
    assert train(task, epochs=task.epochs, seed=seed)["accuracy"] >= 0.96


@needs_mnist
@pytest.mark.parametrize(("name", "steps", "least"), [("mnist-mlp", 600, 0.85), ("mnist-cnn", 300, 0.85)])
def test_mnist_learns(name, steps, least):
    assert train(load_task(name), steps=steps)["accuracy"] > least


@needs_cifar10
def test_cifar10_learns():
    assert train(load_task("cifar10-cnn"), steps=120)["accuracy"] > 0.2


def test_clicks_follow_zipfs_law_and_depend_on_user_and_item():
    (pairs, targets), _ = (part.tensors for part in load_task("clicks").load())
    for column, size in ((0, 700_000), (1, 300_000)):
        counts = pairs[:, column].bincount(minlength=size)
        assert len(counts) == size
        assert counts[:10].sum() < counts[10:100].sum() * 2
        shares = [float(counts[first:last].sum()) / len(pairs) for first, last in ((0, 9), (9, 99), (99, 999))]
        assert max(shares) < 1.3 * min(shares), "as likely as each other by the law: the sum of 1 / r"
    of_first_users = torch.stack([targets[pairs[:, 0] == user].mean() for user in range(8)])
    assert float(of_first_users.max() - of_first_users.min()) > 0.2
