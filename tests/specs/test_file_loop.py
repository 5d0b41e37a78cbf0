"""Training functions named by their file."""

import pickle

import pytest

from paceline import UsageError
from paceline.specs.file_loop import load_loop

GOOD = """
from neighbour import WIDTH

def train(epochs=WIDTH):
    return epochs

def needs(epochs):
    pass

def fails():
    return 1 / 0
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_a_loop_of_a_file_can_be_sent_to_another_folder(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    sent = pickle.dumps(load_loop("mine.py:train"))
    monkeypatch.chdir("/")
    loop = pickle.loads(sent)
    assert loop() == 4
    assert loop.__name__ == "train"


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("missing.py:train", "missing.py does not exist; check the path in path/to/file.py:function"),
        ("missing.py", "write missing.py:function"),
        ("missing.py:", "write missing.py:function"),
        ("mnist-mlp", "'mnist-mlp' does not name a training function in a file"),
        ("{file}:trian", "no function 'trian'; it defines train, needs, fails"),
        ("{file}:needs", "is called without arguments (missing a required argument: 'epochs')"),
    ],
)
def test_messages_name_the_mistake(file, reference, says):
    with pytest.raises(UsageError) as error:
        load_loop(reference.format(file=file))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_fails_is_named_with_its_line(file):
    file.write_text("import math\nmath.nothing\n")
    with pytest.raises(UsageError, match=r"mine\.py failed at line 2: AttributeError"):
        load_loop(f"{file}:train")
