import pickle

import pytest
import torch

from paceline.errors import UsageError
from paceline.tasks import Task, load_task

GOOD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline.tasks import Task
from neighbour import WIDTH

class Model(nn.Linear):
    pass

def datasets(data):
    points = TensorDataset(torch.zeros(8, WIDTH), torch.zeros(8, dtype=torch.int64))
    return points, points

def make():
    return Task(name="mine", model=lambda: Model(WIDTH, 2), datasets=datasets)

def number():
    return 3

def fails():
    return 1 / 0
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_a_users_file_is_a_task(file):
    task = load_task(f"{file}:make")
    assert isinstance(task, Task)
    train, _ = task.load()
    model = task.model()
    assert task.evaluate(model, train)["loss"] > 0
    assert isinstance(pickle.loads(pickle.dumps(model)), type(load_task(f"{file}:make").model()))


def test_an_edited_file_is_run_again(file):
    load_task(f"{file}:make")
    file.write_text(GOOD.replace('"mine"', '"edited"'))
    assert load_task(f"{file}:make").name == "edited"


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("digits-mpl", "Did you mean 'digits-mlp'?"),
        ("nothing-like-it", "Known: digits-mlp, mnist-mlp, mnist-cnn, cifar10-cnn"),
        ("missing.py:make", "missing.py does not exist"),
        ("missing.py", "write missing.py:function"),
        ("{folder}:make", "Unknown task"),
        ("{file}:mak", "no function 'mak'; it defines Model, datasets, make, number, fails"),
        ("{file}:WIDTH", "no function 'WIDTH'"),
        ("{file}:number", "returned int; it must return a paceline Task"),
        ("{file}:fails", "failed at line 22: ZeroDivisionError: division by zero"),
    ],
)
def test_messages_name_the_mistake(file, reference, says):
    with pytest.raises(UsageError) as error:
        load_task(reference.format(file=file, folder=file.parent))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\nimport no_such_package\n", "line 2: ModuleNotFoundError: No module named 'no_such_package'"),
        ("x = 1\n\ndef broken(:\n", "line 3: SyntaxError"),
        ("raise SystemExit(3)", "line 1: SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path, source, says):
    path = tmp_path / "broken.py"
    path.write_text(source)
    for _ in range(2):
        with pytest.raises(UsageError) as error:
            load_task(f"{path}:make")
        assert says in str(error.value)


def test_a_folder_named_like_a_file(tmp_path):
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UsageError, match="is not a file"):
        load_task(f"{tmp_path / 'folder.py'}:make")


def test_equal_seeds_give_equal_models():
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(load_task("digits-mlp").model().state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
