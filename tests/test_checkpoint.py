import pytest
import torch
from torch import nn

import paceline as pl
from paceline import checkpoint
from paceline.checkpoint import Parameters


def optimizer_after(steps, lr=0.1, groups=1):
    parts = [nn.Parameter(torch.ones(3)) for _ in range(groups)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parts], lr=lr, momentum=0.9)
    for _ in range(steps):
        for p in parts:
            p.grad = torch.full_like(p, 2.0)
        optimizer.step()
    return optimizer


def parameters(version=3):
    return Parameters(torch.arange(4.0), version, 20, {"buffer mean": torch.tensor([1, 2])})


def save(folder, number, workers=(0, 1), version=3):
    checkpoint.save_parameters(folder, number, parameters(version))
    for worker in workers:
        checkpoint.save_worker(folder, number, worker, optimizer_after(2), taken=7 + worker)


def test_round_trip(tmp_path):
    save(tmp_path, 20)
    torch.manual_seed(5)
    checkpoint.save_worker(tmp_path, 20, 1, optimizer_after(2), taken=8)
    wanted = torch.rand(3)
    assert checkpoint.complete(tmp_path, 20, [0, 1], {"samples": 5})
    newest = checkpoint.newest(tmp_path)
    assert checkpoint.describe(newest) == {"number": 20, "workers": [0, 1], "samples": 5}
    loaded = checkpoint.load_parameters(newest)
    assert (loaded.version, loaded.next_batch) == (3, 20)
    assert torch.equal(loaded.x, torch.arange(4.0))
    assert torch.equal(loaded.buffers["buffer mean"], torch.tensor([1, 2]))
    optimizer = optimizer_after(0, lr=0.5)
    assert checkpoint.load_worker(newest, 1, optimizer) == 8
    assert torch.equal(torch.rand(3), wanted)
    (state,) = optimizer.state.values()
    assert state["momentum_buffer"].tolist() == pytest.approx([3.8] * 3)
    assert optimizer.param_groups[0]["lr"] == 0.5, "settings stay the caller's"


def test_a_worker_that_was_not_there_begins_anew(tmp_path):
    save(tmp_path, 20)
    checkpoint.complete(tmp_path, 20, [0, 1], {})
    optimizer = optimizer_after(0)
    assert checkpoint.load_worker(checkpoint.newest(tmp_path), 2, optimizer) == 0
    assert not optimizer.state


def test_incomplete_ones_do_not_count_and_older_ones_go(tmp_path):
    save(tmp_path, 10)
    assert checkpoint.complete(tmp_path, 10, [0, 1], {})
    save(tmp_path, 20, workers=[0])
    assert not checkpoint.complete(tmp_path, 20, [0, 1], {})
    assert checkpoint.newest(tmp_path).name == "10"
    assert checkpoint.complete(tmp_path, 20, [0], {})  # worker 1 has died
    assert checkpoint.newest(tmp_path).name == "20"
    assert not (tmp_path / "10").exists()
    save(tmp_path, 100)
    checkpoint.complete(tmp_path, 100, [0, 1], {})
    assert checkpoint.newest(tmp_path).name == "100", "compared as numbers"


def test_the_end_comes_after_all_others(tmp_path):
    save(tmp_path, 30)
    checkpoint.save_worker(tmp_path, None, 0, optimizer_after(1), taken=9)
    number = checkpoint.end(tmp_path, parameters(version=4))
    assert number == 31
    assert checkpoint.complete(tmp_path, number, [0], {})
    assert checkpoint.load_parameters(checkpoint.newest(tmp_path)).version == 4


def test_same_round(tmp_path):
    save(tmp_path, 10)
    assert not checkpoint.same_round(tmp_path / "10", [0, 1])
    checkpoint.save_worker(tmp_path, 10, 1, optimizer_after(2), taken=7)
    assert checkpoint.same_round(tmp_path / "10", [0, 1])
    assert not checkpoint.same_round(tmp_path / "10", [0, 1, 2])


def test_messages(tmp_path):
    with pytest.raises(pl.UsageError, match="no complete checkpoint"):
        checkpoint.newest(tmp_path)
    save(tmp_path, 10)
    checkpoint.complete(tmp_path, 10, [0, 1], {})
    newest = checkpoint.newest(tmp_path)
    with pytest.raises(pl.UsageError, match="other groups"):
        checkpoint.load_worker(newest, 0, optimizer_after(0, groups=2))
    whole = (newest / "parameters.pt").read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2]):
        (newest / "parameters.pt").write_bytes(content)
        with pytest.raises(pl.UsageError, match=r"parameters\.pt cannot be read"):
            checkpoint.load_parameters(newest)


def test_a_resumed_run_starts_from_one_and_keeps_it(tmp_path):
    """A kill may leave a newer one with all its parts, of which nobody said that it is complete."""
    for number in (10, 20, 30):
        save(tmp_path, number)
    checkpoint.save_worker(tmp_path, None, 0, optimizer_after(1), taken=9)
    assert checkpoint.complete(tmp_path, 20, [0, 1], {})
    start = checkpoint.newest(tmp_path)
    checkpoint.clear(tmp_path, keep=start)
    assert [path.name for path in tmp_path.iterdir()] == ["20"]
    save(tmp_path, 30)
    assert checkpoint.complete(tmp_path, 30, [0, 1], {}, keep=start)
    assert checkpoint.load_worker(start, 1, optimizer_after(0)) == 8
    assert checkpoint.newest(tmp_path).name == "30"
