import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from paceline.errors import UsageError
from paceline.tasks import Task, evaluate, fetch, targets_of

INPUTS, TARGETS = torch.arange(14.0).reshape(7, 2), torch.tensor([0, 1, 0, 1, 0, 1, 1])


class Squares(Dataset):
    """Map-style, sample by sample."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return INPUTS[index], int(TARGETS[index])


@pytest.mark.parametrize("dataset", [TensorDataset(INPUTS, TARGETS), Squares()], ids=["tensors", "map-style"])
def test_fetch_and_targets(dataset):
    inputs, targets = fetch(dataset, torch.tensor([3, 0]))
    assert torch.equal(inputs, INPUTS[[3, 0]])
    assert torch.equal(targets, TARGETS[[3, 0]])
    assert torch.equal(targets_of(dataset), TARGETS)


@pytest.mark.parametrize("whole", [TensorDataset(INPUTS, TARGETS), Squares()], ids=["tensors", "map-style"])
def test_fetch_from_a_part(whole):
    part = Subset(Subset(whole, [6, 4, 2, 0]), range(1, 4))  # 4, 2, 0
    inputs, targets = fetch(part, torch.tensor([2, 0]))
    assert torch.equal(inputs, INPUTS[[0, 4]])
    assert torch.equal(targets, TARGETS[[0, 4]])


def test_fetch_takes_a_part_of_tensors_in_one_operation(monkeypatch):
    monkeypatch.delattr(TensorDataset, "__getitem__")
    inputs, _ = fetch(Subset(TensorDataset(INPUTS, TARGETS), range(5)), torch.tensor([1, 3]))
    assert torch.equal(inputs, INPUTS[[1, 3]])


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 1000])
def test_evaluate_is_the_mean_over_samples_whatever_the_chunks(chunk_size):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    result = evaluate(model, TensorDataset(INPUTS, TARGETS), chunk_size=chunk_size)
    output = model(INPUTS).detach()
    assert result["loss"] == pytest.approx(float(nn.functional.cross_entropy(output, TARGETS)), rel=1e-5)
    assert result["accuracy"] == pytest.approx(float((output.argmax(1) == TARGETS).float().mean()), rel=1e-5)


def test_evaluate_restores_every_modules_mode_and_leaves_no_gradient():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model.train()
    model[1].eval()
    evaluate(model, TensorDataset(INPUTS, TARGETS))
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_task_without_accuracy():
    result = evaluate(nn.Linear(2, 2), TensorDataset(INPUTS, INPUTS), loss=nn.functional.mse_loss, accuracy=None)
    assert result["accuracy"] is None


def test_nothing_to_evaluate():
    with pytest.raises(UsageError, match="empty"):
        evaluate(nn.Linear(2, 2), TensorDataset(INPUTS[:0], TARGETS[:0]))


def _fails(data):
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("datasets", "says"),
    [
        (lambda data: (Squares(), TensorDataset(INPUTS[:0], TARGETS[:0])), "its test set is empty; give it"),
        (lambda data: (TensorDataset(INPUTS[:0], TARGETS[:0]), Squares()), "its training set is empty; give it"),
        (lambda data: (iter([1]), Squares()), "its training set has no length"),
        (lambda data: Squares(), "must return the training and the test set, not <"),
        (_fails, r"loading its data failed at line \d+ of .*test_base.py: OSError: the disk is gone"),
    ],
)
def test_data_that_nobody_can_train_on(datasets, says):
    with pytest.raises(UsageError, match=f"^Task 'squares': .*{says}"):
        Task(name="squares", model=lambda: nn.Linear(2, 2), datasets=datasets).load()
