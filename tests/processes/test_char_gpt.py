"""The example's small GPT: alone it is plain PyTorch, its checkpoint goes on, and no two workers draw the same batches."""

import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
import soak_results
from paceline.specs.file_loop import FileLoop

LOOP = FileLoop(Path(__file__).parents[2] / "examples" / "char_gpt.py", "train")
ITERATIONS, SEED = 12, 3


def example():
    return sys.modules[LOOP.load().__module__]


def plainly():
    """What one would write without the two lines."""
    gpt = example()
    torch.manual_seed(SEED)
    model = gpt.GPT()
    optimizer = gpt.make_optimizer(model)
    for iteration in range(ITERATIONS):
        for group in optimizer.param_groups:
            group["lr"] = gpt.RATE * gpt.schedule(iteration, ITERATIONS)
        for _ in range(gpt.ACCUMULATION):
            (model(*gpt.get_batch()) / gpt.ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), gpt.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def assert_equal(one, other):
    for (name, x), (_, y) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(x, y), name


def test_one_worker_is_the_loop_without_the_two_lines_bit_for_bit():
    expected = plainly()
    drawn_next = torch.rand(3)
    model = LOOP.load()(ITERATIONS, SEED)
    assert_equal(model, expected)
    assert torch.equal(torch.rand(3), drawn_next)
    assert model.head.weight is model.character.weight


def test_it_goes_on_from_its_own_checkpoint_as_if_it_had_not_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(example(), "EVALUATE_EVERY", 5)
    file = str(tmp_path / "gpt.pt")
    expected = plainly()
    LOOP.load()(ITERATIONS, SEED, file)
    assert torch.load(file)["iteration"] == 10
    assert_equal(LOOP.load()(ITERATIONS, SEED, file), expected)


def train_noting_batches(folder):
    gpt, drawn = example(), []

    def get_batch(draw=gpt.get_batch):
        batch = draw()
        drawn.append(batch[0].flatten().tolist())
        return batch

    gpt.get_batch = get_batch
    gpt.train(ITERATIONS, SEED)
    (Path(folder) / str(os.getpid())).write_bytes(pickle.dumps(drawn))


@pytest.mark.parametrize(
    ("algorithm", "own"),
    [("all-reduce", ITERATIONS * 2), ("local-sgd", ITERATIONS * 2), ("hogwild", None), ("ad-psgd", None)],
)
def test_no_two_workers_see_the_same_batch_and_all_together_as_many_as_one(algorithm, own, tmp_path):
    """Two workers; in lockstep each has half of every iteration's batches."""
    run = pl.launch(partial(train_noting_batches, str(tmp_path)), workers=2, algorithm=algorithm)
    drawn = [pickle.loads(one.read_bytes()) for one in tmp_path.iterdir()]
    distinct = {tuple(one) for own_batches in drawn for one in own_batches}
    assert len(distinct) == len(drawn[0]) + len(drawn[1])
    gpt = example()
    alone = gpt.BATCH * gpt.ACCUMULATION * ITERATIONS
    if own is not None:
        assert list(map(len, drawn)) == [own, own]
        assert run.result["samples"] == alone
    else:
        assert alone <= run.result["samples"] <= alone + gpt.BATCH * gpt.ACCUMULATION  # one was under way


@pytest.mark.soak
def test_its_loss_is_that_of_one_worker_within_three_percent_under_every_family(tmp_path):
    """Three seeds, 2 and 4 workers: three quarters of an hour."""
    root = LOOP.path.parents[1]
    script, file = root / "benchmarks" / "small_gpt.py", tmp_path / "losses.json"
    done = subprocess.run([sys.executable, script, "--json", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    soak_results.keep("soak_small_gpt", "losses", json.loads(file.read_text()))
