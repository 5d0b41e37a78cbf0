"""A disk that takes no more, at every write of every verb: one sentence, and what is on the disk is whole."""

import json
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import forked
import paceline as pl
from failing_disk import every_moment, full
from paceline.advice.calibration.machine import write_file
from paceline.cli.app import app
from paceline.errors import NotWrittenError
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from paceline.records.run_data import RunData
from paceline.simulator import Cluster
from paceline.system import files, tensor_files
from paceline.worker.server_process import ServerStorage
from paceline.worker.supervised import Outcome


def check_whole(folder):
    """Every file is one that can be read, and none is half of one."""
    for path in Path(folder).rglob("*"):
        assert not path.name.endswith(".tmp"), path
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>"), path
        elif path.suffix == ".pt":
            tensor_files.load(path, "the file")
        elif path.suffix == ".npz":
            assert np.load(path, allow_pickle=False).files
        elif path.suffix in (".toml", ".txt", ".csv"):
            assert path.read_text().endswith("\n"), path
    if (Path(folder) / "config.json").exists():
        RunData.load(folder)
    if (newest := checkpoint_files.newest_or_none(Path(folder) / "checkpoint")) is not None:
        checkpoint_files.check(newest)


def complain(result):
    """The sentence of a command that could not do all; None if it could."""
    assert "Traceback" not in result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code == 0:
        return None
    assert result.exit_code in (1, 2), result.output
    (sentence,) = [line for line in result.stderr.splitlines() if line.startswith("paceline: ")]
    assert re.search(r"cannot be (written|made) \(", sentence), sentence
    return sentence


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words], prog_name="paceline")


TRAIN = ["train", "--workers", 1, "--backend", "threads", "--algorithm", "locked"]


# Every test goes through one step of every file; `make soak` through all four.
THOROUGH = pytest.mark.parametrize(
    "thorough", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["", "thorough"]
)


@THOROUGH
def test_train(thorough, monkeypatch, tmp_path):
    """From some moment on nothing can be written any more; the run trains to its end, and what it measured is shown."""
    codes, refused = set(), set()
    for number, moment in enumerate(every_moment(monkeypatch, tmp_path, thorough=thorough)):
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        with moment() as disk:
            result = command(*TRAIN, "--steps", 20, "--out", folder)
        codes.add(result.exit_code)
        refused |= {disk.at[1].removesuffix(".sha256")} if disk.refused else set()
        assert (complain(result) is not None) == disk.refused, (disk.at, result.output)
        if folder.exists():
            check_whole(folder)
    assert codes == {0, 1, 2}
    wanted = {"config.json", "events-0.bin", "events-0.jsonl", "evaluations.json", "result.json", "trace.json"}
    assert wanted | {"report.html", "worker-0.pt", "parameters.pt", "complete.json", "checkpoint"} <= refused


@THOROUGH
def test_resume(thorough, monkeypatch, tmp_path):
    """Whatever fails, the checkpoint that the run went on from, or a later one, is whole; with room again it goes on."""
    first = tmp_path / "first"
    assert command(*TRAIN, "--steps", 20, "--out", first).exit_code == 0
    for number, moment in enumerate(every_moment(monkeypatch, tmp_path, thorough=thorough)):
        folder = tmp_path / str(number) / "run"
        shutil.copytree(first, folder)
        with moment() as disk:
            result = command("train", "--resume", folder, "--steps", 40)
        assert (complain(result) is not None) == disk.refused, (disk.at, result.output)
        check_whole(folder)
        assert checkpoint.load_parameters(checkpoint_files.newest(folder / "checkpoint")).version in (20, 40)
        assert command("train", "--resume", folder, "--steps", 60).exit_code == 0
        assert RunData.load(folder).records[0]["applied_version"].tolist() == list(range(1, 61)), disk.at


@THOROUGH
def test_a_short_failure(thorough, monkeypatch, tmp_path):
    """One change is refused, and those after it are not: events and the last checkpoint are tried again."""
    recovered = set()
    for number, moment in enumerate(every_moment(monkeypatch, tmp_path, number=1, thorough=thorough)):
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        with moment() as disk:
            result = command(*TRAIN, "--steps", 20, "--out", folder)
        if complain(result) is None and disk.refused:
            recovered.add(disk.at[1])
            run = RunData.load(folder)
            assert run.records[0]["applied_version"].tolist() == list(range(1, 21))
            assert checkpoint.load_parameters(checkpoint_files.newest(folder / "checkpoint")).version == 20
        if folder.exists():
            check_whole(folder)
    assert {"worker-0.pt", "events-0.bin"} <= recovered


class Loop:
    """A training loop of two epochs, each of ten batches."""

    __name__ = "Loop"

    def __call__(self):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for _ in range(2):
                for x in worker.batches([torch.randn(2, 4) for _ in range(10)]):
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    worker.report(loss)


@THOROUGH
def test_launch(thorough, monkeypatch, tmp_path):
    ended = []
    for number, moment in enumerate(every_moment(monkeypatch, tmp_path, thorough=thorough)):
        folder = tmp_path / str(number) / "run"
        folder.parent.mkdir()
        failure = None
        with moment() as disk:
            try:
                run = pl.launch(Loop(), workers=1, backend="threads", algorithm="locked", out=folder)
            except pl.PacelineError as error:
                failure, run = error, getattr(error, "run", None)
                error.__traceback__ = None
        if folder.exists():
            check_whole(folder)
        assert (failure is not None) == disk.refused
        if failure is not None:
            assert re.search(r"cannot be (written|made) \(", str(failure)), disk.at
            ended.append(run is not None)
        if run is not None:
            assert run.result["steps"] == 20
    assert ended == sorted(ended), "once the run has begun, what it measured is not lost"
    assert set(ended) == {False, True}


def every_code(monkeypatch, folder, words, *, thorough):
    """Runs a verb once for every moment of the disk; returns what was refused."""
    refused = []
    for number, moment in enumerate(every_moment(monkeypatch, folder, thorough=thorough)):
        out = folder / str(number) / "out"
        out.parent.mkdir(parents=True)
        with moment() as disk:
            result = command(*[str(word).format(out=out) for word in words])
        assert (complain(result) is not None) == disk.refused, (disk.at, result.output)
        refused += [disk.at[1]] if disk.refused else []
        check_whole(out.parent)
    return refused


@THOROUGH
def test_simulate(thorough, monkeypatch, tmp_path):
    words = ["simulate", "--timing-only", "--steps", 5, "--parameters", 100, "--out", "{out}"]
    refused = every_code(monkeypatch, tmp_path, words, thorough=thorough)
    assert "host.json" in refused


@THOROUGH
def test_compare(thorough, monkeypatch, tmp_path):
    words = ["compare", *TRAIN[1:-1], "hogwild", "--steps", 2, "--out", "{out}"]
    refused = every_code(monkeypatch, tmp_path, words, thorough=thorough)
    assert {"report.html", "1-hogwild-1-workers"} <= set(refused)


@THOROUGH
def test_study(thorough, monkeypatch, tmp_path):
    words = ["study", "run", "--backend", "simulator", "--timing-only", "--parameters", 100, "--steps", 4, "--seeds", 1]
    refused = every_code(monkeypatch, tmp_path, [*words, "--workers", "1,2", "--out", "{out}"], thorough=thorough)
    assert {"study.toml", "plan.json", "trial.json", "table.parquet", "table.csv", "report.html"} <= set(refused)


@THOROUGH
def test_sparse(thorough, monkeypatch, tmp_path):
    (tmp_path / "data.svm").write_text("".join(f"{n % 2} 1:{n} 2:{n % 3}\n" for n in range(8)))
    fit = ["sparse", "fit", tmp_path / "data.svm", "--passes", 2, "--n-jobs", 1, "--model", "{out}.npz"]
    assert every_code(monkeypatch, tmp_path / "fit", fit, thorough=thorough)
    model = tmp_path / "model.npz"
    assert command(*fit[:-1], model).exit_code == 0
    predict = ["sparse", "predict", model, tmp_path / "data.svm", "--out", "{out}.txt"]
    assert every_code(monkeypatch, tmp_path / "predict", predict, thorough=thorough)


@THOROUGH
def test_cluster_files(thorough, monkeypatch, tmp_path):
    """What `calibrate` writes; measuring takes too long for here."""
    for name in ("cluster.toml", "cluster.json"):
        path = tmp_path / name
        write_file(Cluster(workers=2), ["measured"], path)
        before = path.read_bytes()
        for moment in every_moment(monkeypatch, tmp_path, thorough=thorough):
            path.write_bytes(before)
            failure = None
            with moment() as disk:
                try:
                    write_file(Cluster(workers=3), ["again"], path)
                except NotWrittenError as error:
                    failure = str(error)
            assert (failure is not None) == disk.refused
            assert failure is None or f"{name} cannot be written (" in failure
            assert (path.read_bytes() == before) == (failure is not None)
        assert sorted(tmp_path.iterdir()) == sorted({path, *tmp_path.glob("cluster.*")})


def test_what_is_no_file_stays_what_it_is(tmp_path):
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(NotWrittenError, match="is not a regular file: name another"):
            files.write_text(path, "text")
    assert not Path("/dev/null").is_file()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    files.write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert [path.read_text() for path in (tmp_path / "there").iterdir()] == ["text"]


# A server's snapshots


class Shared:
    """As much of a vector in shards as snapshots need."""

    def __init__(self):
        self.x, self.version, self.begin, self.ranges = torch.zeros(3), 0, 0, [(0, 3)]

    def restore(self, x):
        self.x.copy_(x)


@pytest.fixture
def served(tmp_path):
    """A server's storage that makes snapshots as often as it can, its vector, and what it has told the supervisor."""
    shared, told = Shared(), []
    storage = ServerStorage(
        0, SimpleNamespace(shared=shared), tmp_path, 0.0, tmp_path / "checkpoint", None, told.append
    )

    def keep(version):
        shared.version = version
        storage.keep(lambda: {"x": shared.x + version, "version": version, "range": (0, 3), "rule": {}}, version)
        wait_until_written(storage)

    yield storage, keep, told
    storage.close()


def wait_until_written(storage):
    if storage._written is not None:
        storage._written.result()


def successor(tmp_path):
    """What one that takes the place of a dead server goes on from."""
    storage = ServerStorage(0, SimpleNamespace(shared=Shared()), tmp_path, 0.0, None, None)
    storage.begin(restarted=True)
    return storage.restore()["version"]


def test_snapshots_go_on_after_one_has_failed(served, tmp_path, monkeypatch):
    """Once, the thread that writes ended with its first error, and every later snapshot was missing without a word."""
    _, keep, told = served
    keep(0)
    keep(1)
    assert successor(tmp_path) == 1
    with full(monkeypatch, tmp_path.parent):
        keep(2)
        keep(3)
        assert successor(tmp_path) == 1
    keep(4)
    assert successor(tmp_path) == 4
    assert [one.is_snapshot for one in told] == [True, True]
    assert "shard-0.pt cannot be written (No space left on device)" in told[0].why


def test_a_failed_snapshot_is_tried_again_without_a_new_update(served, tmp_path, monkeypatch):
    _, keep, _ = served
    keep(0)
    with full(monkeypatch, tmp_path.parent):
        keep(1)
    keep(1)
    assert successor(tmp_path) == 1


def test_the_first_snapshot_may_fail_too(served, tmp_path, monkeypatch):
    _, keep, told = served
    with full(monkeypatch, tmp_path.parent):
        keep(0)
        with pytest.raises(
            pl.PacelineError, match=r"it died, and no process can replace it: its snapshot .* cannot be read"
        ):
            successor(tmp_path)
    keep(0)
    assert successor(tmp_path) == 0
    assert len(told) == 1


def test_a_failure_at_the_end_is_told_and_hangs_nobody(tmp_path, monkeypatch):
    told = []
    storage = ServerStorage(0, SimpleNamespace(shared=Shared()), tmp_path, 0.0, None, None, told.append)
    for version in (0, 1):
        storage.keep(lambda version=version: {"x": torch.zeros(3), "version": version}, version)
    wait_until_written(storage)
    with full(monkeypatch, tmp_path.parent):
        storage.keep(lambda: {"x": torch.zeros(3), "version": 2}, 2)
        storage.close()
    assert [one.is_snapshot for one in told] == [True]


def test_a_servers_part_of_a_checkpoint_that_fails_ends_nobody(served, tmp_path, monkeypatch):
    storage, _, told = served
    state = {"x": torch.zeros(3), "version": 7, "range": (0, 3), "rule": {}}
    with full(monkeypatch, tmp_path.parent):
        storage.checkpoint(lambda: state, 20)
    assert [(one.number, one.is_snapshot) for one in told] == [(20, False)]
    storage.checkpoint(lambda: state, 40)
    assert (tmp_path / "checkpoint" / "40" / "server-0.pt").exists()


def test_what_the_supervisor_makes_of_it():
    outcome = Outcome()
    for number in (20, 20, 40, None):
        outcome.leave_out(number, "It is full.")
    for _ in range(3):
        outcome.count_failed_snapshot("It is full.")
    assert (len(outcome.left_out), outcome.snapshots_failed, len(outcome.notes)) == (3, 3, 2)


def test_a_checkpoint_with_a_missing_part_makes_room_and_the_one_before_stays(monkeypatch, tmp_path):
    """At every epoch a checkpoint, of which that of one epoch fails: the next one is written, and nothing is left of it."""
    seen, disk = [], threading.Event()
    original = checkpoint_files.write_part

    def write_part(folder, number, name, content):
        # Not one of a fixed number: a worker that others have outrun for a whole epoch leaves that epoch's out.
        if number and name == "worker-0.pt":
            assert disk.wait(forked.AGAINST_HANGS_S)  # or it might make all epochs before worker 1 begins one
        elif number and name == "worker-1.pt" and not disk.is_set():
            disk.set()
            raise NotWrittenError("worker-1.pt cannot be written (No space left on device): make room there.")
        original(folder, number, name, content)

    monkeypatch.setattr(checkpoint, "write_part", write_part)
    config = pl.TrainConfig(
        workers=2, backend="threads", epochs=12, batch_size=32, algorithm="locked", checkpoint_every_s=0.0
    )
    run = pl.train(config, out=tmp_path / "run", on_progress=lambda one: seen.append(one.message))
    assert run.result["checkpoints_failed"] == 1
    (note,) = [note for note in run.result["notes"] if "checkpoint" in note]
    assert note.startswith("A checkpoint is left out, and the one before it stays: worker-1.pt cannot be written")
    assert len(checkpoint_files.numbers(tmp_path / "run" / "checkpoint")) == 1
    assert checkpoint.load_parameters(checkpoint_files.newest(tmp_path / "run" / "checkpoint")).version == 12 * 45


def test_whatever_fails_in_the_thread_that_writes_snapshots_hangs_nobody(tmp_path, monkeypatch):
    told = []
    storage = ServerStorage(0, SimpleNamespace(shared=Shared()), tmp_path, 0.0, None, None, told.append)
    storage.keep(lambda: {"x": torch.zeros(3), "version": 0}, 0)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "save", lambda *_, **__: [][0])
        storage.keep(lambda: {"x": torch.zeros(3), "version": 1}, 1)
        wait_until_written(storage)
    storage.keep(lambda: {"x": torch.zeros(3), "version": 2}, 2)
    storage.close()
    assert [one.why for one in told] == ["IndexError: list index out of range"]
    assert successor(tmp_path) == 2
