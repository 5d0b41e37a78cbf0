import pytest
import torch
from torch import nn

import paceline as pl
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from paceline.records.checkpoint_contents import Parameters


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
    torch.manual_seed(5)
    save(tmp_path, 20)
    wanted = torch.rand(3)
    assert checkpoint_files.complete(tmp_path, 20, [0, 1], {"samples": 5})
    newest = checkpoint_files.newest(tmp_path)
    about = checkpoint_files.describe(newest)
    assert about.pop("sha256").keys() == {"parameters.pt", "worker-0.pt", "worker-1.pt"}
    assert about == {"number": 20, "workers": [0, 1], "samples": 5}
    assert not list(newest.glob("*.sha256"))
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
    checkpoint_files.complete(tmp_path, 20, [0, 1], {})
    optimizer = optimizer_after(0)
    assert checkpoint.load_worker(checkpoint_files.newest(tmp_path), 2, optimizer) == 0
    assert not optimizer.state


def test_incomplete_ones_do_not_count_and_older_ones_go(tmp_path):
    save(tmp_path, 10)
    assert checkpoint_files.complete(tmp_path, 10, [0, 1], {})
    save(tmp_path, 20, workers=[0])
    assert not checkpoint_files.complete(tmp_path, 20, [0, 1], {})
    assert checkpoint_files.newest(tmp_path).name == "10"
    assert checkpoint_files.complete(tmp_path, 20, [0], {})  # worker 1 has died
    assert checkpoint_files.newest(tmp_path).name == "20"
    assert not (tmp_path / "10").exists()
    save(tmp_path, 100)
    checkpoint_files.complete(tmp_path, 100, [0, 1], {})
    assert checkpoint_files.newest(tmp_path).name == "100", "compared as numbers"


def test_the_end_comes_after_all_others(tmp_path):
    save(tmp_path, 30)
    checkpoint.save_worker(tmp_path, None, 0, optimizer_after(1), taken=9)
    number = checkpoint.end(tmp_path, parameters(version=4))
    assert number == 31
    assert checkpoint_files.complete(tmp_path, number, [0], {})
    assert checkpoint.load_parameters(checkpoint_files.newest(tmp_path)).version == 4


def test_same_round(tmp_path):
    for worker, taken in enumerate([7, 7, 8]):
        checkpoint.save_worker(tmp_path, 10, worker, optimizer_after(2), taken=taken)
    assert checkpoint.same_round(tmp_path / "10", [0, 1])
    assert not checkpoint.same_round(tmp_path / "10", [0, 1, 2])
    assert not checkpoint.same_round(tmp_path / "10", [0, 1, 3])


def test_a_part_once_written_stays_as_it_was(tmp_path):
    """A replaced worker comes by its predecessor's checkpoint in the midst of the epoch."""
    save(tmp_path, 10, workers=[0])
    checkpoint.save_worker(tmp_path, 10, 0, optimizer_after(2), taken=99)
    assert checkpoint_files.complete(tmp_path, 10, [0], {})
    checkpoint.save_worker(tmp_path, 10, 0, optimizer_after(2), taken=99)
    assert checkpoint.load_worker(checkpoint_files.newest(tmp_path), 0, optimizer_after(0)) == 7


def test_of_the_end_the_last_part_counts(tmp_path):
    checkpoint.save_worker(tmp_path, None, 0, optimizer_after(2), taken=5)
    checkpoint.save_worker(tmp_path, None, 0, optimizer_after(2), taken=6)
    number = checkpoint.end(tmp_path, parameters())
    assert checkpoint_files.complete(tmp_path, number, [0], {})
    assert checkpoint.load_worker(checkpoint_files.newest(tmp_path), 0, optimizer_after(0)) == 6


def test_messages(tmp_path):
    with pytest.raises(pl.UsageError, match="no complete checkpoint"):
        checkpoint_files.newest(tmp_path)
    save(tmp_path, 10)
    checkpoint_files.complete(tmp_path, 10, [0, 1], {})
    newest = checkpoint_files.newest(tmp_path)
    with pytest.raises(pl.UsageError, match="different parameter groups"):
        checkpoint.load_worker(newest, 0, optimizer_after(0, groups=2))
    for name in ("parameters.pt", "worker-1.pt", "complete.json"):
        whole = (newest / name).read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for content in (b"", b"nonsense", whole[:middle], flipped):
            (newest / name).write_bytes(content)
            with pytest.raises(pl.UsageError, match=rf"{name}.*; start the run again without it\.") as raised:
                checkpoint_files.newest(tmp_path)
            assert str(raised.value).count("\n") == 0
        (newest / name).unlink()
        with pytest.raises(pl.UsageError, match=rf"{name}.*No such file|no complete checkpoint"):
            checkpoint_files.newest(tmp_path)
        (newest / name).write_bytes(whole)
    assert checkpoint_files.newest(tmp_path) == newest


def test_an_older_one_that_is_whole_is_named(tmp_path):
    for number in (10, 20):
        save(tmp_path, number)
        checkpoint_files.complete(tmp_path, number, [0, 1], {}, keep=tmp_path / "10")
    (tmp_path / "20" / "worker-1.pt").write_bytes(b"torn")
    with pytest.raises(pl.UsageError, match=r"an older one, .*/10, is whole: remove .*/20 to resume from there"):
        checkpoint_files.newest(tmp_path)
    (tmp_path / "10" / "parameters.pt").unlink()
    with pytest.raises(pl.UsageError, match="start the run again without it"):
        checkpoint_files.newest(tmp_path)


def test_one_of_an_earlier_version_is_refused(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "10" / "complete.json").write_text('{"number": 10, "workers": [0, 1], "samples": 5}')
    with pytest.raises(pl.UsageError, match="has no checksums: an earlier version of Paceline wrote it"):
        checkpoint_files.newest(tmp_path)


WRONG = [
    ("parameters.pt", {"next_batch": -1}),
    ("parameters.pt", {"next_batch": 10**9}),
    ("parameters.pt", {"next_batch": 1.5}),
    ("parameters.pt", {"version": -1}),
    ("parameters.pt", {"version": True}),
    ("parameters.pt", {"x": torch.zeros(2, 2)}),
    ("parameters.pt", {"x": torch.zeros(4, dtype=torch.int64)}),
    ("parameters.pt", {"x": [1.0]}),
    ("parameters.pt", {"buffers": {"buffer mean": 3}}),
    ("parameters.pt", {"more": 1}),
    ("worker-0.pt", {"taken": -1}),
    ("worker-0.pt", {"taken": "7"}),
    ("worker-0.pt", {"optimizer": {}}),
    ("worker-0.pt", {"optimizer": {"state": {}, "param_groups": [3]}}),
    ("worker-0.pt", {"random": torch.zeros(3)}),
    ("worker-0.pt", {"random": torch.zeros(3, dtype=torch.uint8)}),
    ("worker-0.pt", {"x": torch.zeros(4)}),
    ("worker-0.pt", {"program": 1}),
    ("server-0.pt", {"version": None}),
    ("server-0.pt", {"range": (0, 3)}),
    ("server-0.pt", {"range": (1, 5)}),
    ("server-0.pt", {"range": "04"}),
    ("server-0.pt", {"rule": {"sum": 1.0}}),
    ("server-0.pt", {"x": torch.zeros(3)}),
]


@pytest.mark.parametrize(("name", "changed"), WRONG, ids=[f"{name} {next(iter(what))}" for name, what in WRONG])
def test_what_no_run_writes_is_refused_also_with_a_right_checksum(name, changed, tmp_path):
    save(tmp_path, 30, workers=[0])
    checkpoint.save_server(tmp_path, 30, 0, {"range": (0, 4), "x": torch.zeros(4), "version": 3, "rule": {}})
    content = torch.load(tmp_path / "30" / name, weights_only=True) | changed
    (tmp_path / "30" / f"{name}.sha256").unlink()
    checkpoint_files.write_part(tmp_path, 30, name, content)
    assert checkpoint_files.complete(tmp_path, 30, [0], {}, num_servers=1)
    newest = checkpoint_files.newest(tmp_path)
    load = (
        (lambda: checkpoint.load_worker(newest, 0, optimizer_after(0)))
        if name == "worker-0.pt"
        else (lambda: checkpoint.load_parameters(newest))
    )
    with pytest.raises(pl.UsageError, match=rf"{name} holds a value that no run writes"):
        load()


def test_a_resumed_run_starts_from_one_and_keeps_it(tmp_path):
    """A kill may leave a newer one with all its parts, of which nobody said that it is complete."""
    for number in (10, 20, 30):
        save(tmp_path, number)
    checkpoint.save_worker(tmp_path, None, 0, optimizer_after(1), taken=9)
    assert checkpoint_files.complete(tmp_path, 20, [0, 1], {})
    start = checkpoint_files.newest(tmp_path)
    checkpoint_files.clear(tmp_path, keep=start)
    assert [path.name for path in tmp_path.iterdir()] == ["20"]
    save(tmp_path, 30)
    assert checkpoint_files.complete(tmp_path, 30, [0, 1], {}, keep=start)
    assert checkpoint.load_worker(start, 1, optimizer_after(0)) == 8
    assert checkpoint_files.newest(tmp_path).name == "30"


def test_one_worker_of_the_newest_run_writes_the_last_checkpoint(tmp_path):
    """A worker of an earlier run that wakes up late writes none."""
    folder = tmp_path / "checkpoint"
    checkpoint_files.begin(folder, "first", keep=None)
    assert not checkpoint_files.claim_end(folder, "second")
    checkpoint_files.begin(folder, "second", keep=None)
    assert not checkpoint_files.claim_end(folder, "first")
    assert checkpoint_files.claim_end(folder, "second")
    assert not checkpoint_files.claim_end(folder, "second")
    assert not list(folder.iterdir())
