"""The example under torchrun: the loss of one process on every mesh, and on from another mesh's checkpoint."""

import re
from pathlib import Path

import pytest

import forked

EXAMPLE = Path(__file__).parents[3] / "examples" / "tensor_parallel.py"
STEPS = ("--steps", 20)


def run(*words, workers=None):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers] if workers else []
    with forked.Python([*launcher, EXAMPLE, *words], errors=None) as process:
        printed, errors = process.communicate(forked.AGAINST_HANGS_S)
        return process.returncode, printed, errors


def loss(*words, workers=None):
    code, printed, errors = run(*words, workers=workers)
    assert code == 0, errors
    (found,) = re.findall(r"loss ([\d.]+) after", printed)  # Gloo's own lines in PyTorch 2.8 can run into each other
    return float(found)


@pytest.fixture(scope="module")
def alone():
    return loss(*STEPS)


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (4, ["--mesh", "2x2"]),
        (8, ["--mesh", "2x2x2"]),
        (3, ["--mesh", "line 3"]),
    ],
    ids=str,
)
def test_a_mesh_reaches_the_loss_of_one_process(workers, words, alone, nothing_left):
    assert loss(*words, *STEPS, workers=workers) == pytest.approx(alone, rel=1e-3)
    assert alone < 4, "chance is 4.6: it has learnt"


@pytest.mark.parametrize(("words", "workers"), [(["--workers", 4], None), ([], 4)], ids=["launch", "torchrun"])
def test_a_layout_reaches_the_loss_of_one_process(words, workers, alone, nothing_left):
    assert loss("--layout", "tensor(q=2)", *words, *STEPS, workers=workers) == pytest.approx(alone, rel=1e-3)


def test_replicas_learn_too(alone, nothing_left):
    words = ["--layout", "tensor(line=2)", "--workers", 4, "--algorithm", "da-sgd(period=4)"]
    assert loss(*words, *STEPS) == pytest.approx(alone, rel=0.05)


def test_it_goes_on_from_a_checkpoint_of_another_mesh(tmp_path, alone, nothing_left):
    file = ["--checkpoint", tmp_path / "saved.pt"]
    loss("--mesh", "2x2", "--steps", 10, *file, workers=4)
    assert loss(*STEPS, *file) == pytest.approx(alone, rel=1e-3)


def test_a_wrong_mesh_is_one_sentence(nothing_left):
    for words, says in ((["--mesh", "2x2"], "needs 4 workers, and there are 1"), (["--mesh", "2x3"], "is not a mesh")):
        code, printed, errors = run(*words)
        assert (code, printed) == (2, "")
        assert says in errors
        assert len(errors.splitlines()) == 1
