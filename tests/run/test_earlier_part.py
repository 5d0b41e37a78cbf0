"""What a run goes on from is read as a whole before anything is changed; what is missing or there twice is said."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

import paceline as pl
from contracts.test_stops import train
from paceline.algorithms import Hogwild
from paceline.errors import OverrideWarning
from paceline.model_parallel.graph.program import PlacedProgram
from paceline.records import checkpoint_files
from paceline.records.run_data import RunData, write_events
from paceline.records.step_record import shift_times
from paceline.run.earlier_part import EarlierPart
from rewritten import rewrite, rewrite_json, write_checked

CONFIG = {"workers": 2, "backend": "threads", "batch_size": 32}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run of an algorithm, made when first asked for."""
    folder, known = tmp_path_factory.mktemp("made"), set()

    def make(algorithm):
        if algorithm not in known:
            known.add(algorithm)
            pl.train(pl.TrainConfig(algorithm=algorithm, steps=20, **CONFIG), out=folder / algorithm)
        return folder / algorithm

    return make


@pytest.fixture
def run(made, tmp_path):
    """A copy of it, to be damaged."""
    return lambda algorithm: shutil.copytree(made(algorithm), tmp_path / algorithm)


def change(folder, worker, changed):
    """Writes a worker's events anew, as `changed` makes them."""
    path = folder / f"events-{worker}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(changed(lines)))


def resumed(folder, algorithm, steps=30):
    return pl.train(pl.TrainConfig(algorithm=algorithm, steps=steps, **CONFIG), resume=folder)


@pytest.mark.parametrize("algorithm", ["leashed", "parameter-server", "ad-psgd", "local-sgd"])
def test_of_a_whole_run_nothing_is_said(algorithm, made):
    """AD-PSGD's averages count as versions, and are no updates."""
    earlier = EarlierPart.of(made(algorithm))
    assert earlier.notes == ()
    assert earlier.run.result["records_lost"] == 0
    assert sum(len(rows) for rows in earlier.run.records.values()) == 40


@pytest.mark.parametrize("algorithm", ["leashed", "ad-psgd"])
def test_missing_events_are_counted_and_said(algorithm, run):
    folder = run(algorithm)
    change(folder, 1, lambda lines: [*lines[:3], *lines[7:]])
    ended = resumed(folder, algorithm)
    (note,) = ended.result["notes"]
    assert note.startswith(f"4 events up to the checkpoint are not in {folder}: they count as `records_lost`")
    assert (ended.result["records_lost"], ended.result["steps"]) == (4, 60)
    (folder / "events-1.jsonl").unlink()
    assert resumed(folder, algorithm, steps=40).result["records_lost"] == 30, "a resumed run keeps count"


TOGETHER = ["lockstep", "all-reduce", "parameter-server"]  # an update has events of several workers
EVERY = [*TOGETHER, "leashed", "d-psgd", "local-sgd", "diloco", "downpour", "ad-psgd"]


@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.parametrize("algorithm", EVERY)
def test_events_that_are_cut_off_are_counted(left, algorithm, run):
    """Also where every update has the event of another worker, or the run is resumed twice."""
    folder = run(algorithm)
    change(folder, 1, lambda lines: lines[:left])
    earlier = EarlierPart.of(folder)
    (note,) = earlier.notes
    assert note.startswith(f"{20 - left} events up to the checkpoint are not in {folder}: they count as `records_lost`")
    first = resumed(folder, algorithm)
    assert first.result["records_lost"] == 20 - left
    assert first.result["samples"] == sum(int(rows["samples"].sum()) for rows in first.records.values())
    (folder / "events-1.jsonl").write_text("")
    second = resumed(folder, algorithm, steps=40).result
    assert second["records_lost"] == 30
    assert second["steps"] == first.result["steps"] + (10 if algorithm in TOGETHER else 20)


@pytest.mark.parametrize("algorithm", EVERY)
def test_what_another_run_has_written_is_refused(algorithm, run, tmp_path):
    folder, other = run(algorithm), tmp_path / "other"
    pl.train(pl.TrainConfig(algorithm=algorithm, steps=20, **CONFIG), out=other)
    for name in ("config.json", "checkpoint", "events-0.jsonl", "events-1.jsonl"):
        mixed = shutil.copytree(folder, tmp_path / f"with {name}")
        (shutil.rmtree if name == "checkpoint" else lambda path: path.unlink())(mixed / name)
        (shutil.copytree if name == "checkpoint" else shutil.copy)(other / name, mixed / name)
        with pytest.raises(
            pl.UsageError, match=r"belong to two runs: put|has other events of worker [01] than its run wrote"
        ):
            resumed(mixed, algorithm)


def test_a_run_keeps_its_identity_in_its_folder(run, tmp_path):
    folder = run("leashed")
    first = EarlierPart.of(folder).run_id
    assert first
    resumed(folder, "leashed")
    assert EarlierPart.of(folder).run_id == first
    pl.train(pl.TrainConfig(algorithm="leashed", steps=40, **CONFIG), resume=folder, out=tmp_path / "elsewhere")
    assert EarlierPart.of(tmp_path / "elsewhere").run_id != first


def test_a_configuration_without_one_of_its_fields_is_refused(run):
    """Whichever it is: the run would go on with the field's default."""
    folder = run("leashed")
    config = json.loads((folder / "config.json").read_text())
    for name in config:
        for changed in ({}, {name: "other"}):
            kept = {key: value for key, value in config.items() if key != name}
            (folder / "config.json").write_text(json.dumps(kept | changed))
            with pytest.raises(
                pl.UsageError, match=r"config\.json is damaged, .*: its checksum does not match its contents"
            ):
                EarlierPart.of(folder)


@pytest.mark.parametrize("algorithm", ["leashed", "ad-psgd"])
def test_events_that_are_there_twice_count_once(algorithm, run):
    folder = run(algorithm)
    change(folder, 0, lambda lines: [*lines, *lines[4:7]])
    ended = resumed(folder, algorithm)
    assert ended.result["notes"] == [f"3 events of worker 0 in {folder} are there twice, and count once."]
    assert (ended.result["records_lost"], ended.result["steps"]) == (0, 60)


@pytest.mark.parametrize("algorithm", ["leashed", "ad-psgd"])
def test_the_events_of_two_runs_are_refused(algorithm, run):
    """As two runs left them that were resumed in one folder at once, before folders were locked."""
    folder = run(algorithm)
    change(folder, 0, lambda lines: [*lines, lines[-1].replace('"batch": ', '"batch": 1')])
    with pytest.raises(
        pl.UsageError, match=r"has the events of two runs, because its update \d+ was made twice: start"
    ):
        EarlierPart.of(folder)


def test_a_spool_and_final_events_are_put_together(run):
    """A killed run has both where it had been resumed: those that it had when it was, and its own."""
    folder = run("leashed")
    whole = EarlierPart.of(folder)
    about = checkpoint_files.describe(whole.checkpoint)
    for worker, rows in RunData.load(folder).records.items():
        write_events(folder / f"events-{worker}.jsonl", rows[:8])
        shift_times(rows, about["started_s"])
        (folder / f"events-{worker}.bin").write_bytes(rows[8:].tobytes() + b"cut off")
    found = EarlierPart.of(folder)
    assert found.notes == ()
    for worker, rows in whole.run.records.items():
        assert np.array_equal(found.run.records[worker]["applied_version"], rows["applied_version"])
        np.testing.assert_allclose(found.run.records[worker]["ended_s"], rows["ended_s"], atol=1e-6)
    (folder / "events-1.bin").write_bytes(np.full(400, 255, np.uint8).tobytes())
    with pytest.raises(pl.UsageError, match=r"events-1\.bin, event 1: it holds a value that no run writes"):
        EarlierPart.of(folder)


WRONG = [
    {"samples": -1},
    {"samples": 1.5},
    {"samples": None},
    {"elapsed_s": -0.1},
    {"elapsed_s": math.nan},
    {"started_s": "now"},
    {"started_s": math.inf},
    {"initial_loss": "low"},
    {"batches_missed": -1},
    {"batches_missed": True},
    {"records_lost": None},
    {"run_id": 3},
    {"waits": 0},
    {"events": [1]},
    {"events": {"one": {"1": [1, 2]}}},
    {"events": {"0": [1, 2]}},
    {"events": {"0": {"1": [1]}}},
    {"events": {"0": {"1": [1, -2]}}},
]


@pytest.mark.parametrize("changed", WRONG, ids=str)
def test_what_no_run_says_is_refused_also_with_a_right_checksum(changed, run):
    folder = run("leashed")
    newest = checkpoint_files.newest(folder / "checkpoint")
    write_checked(newest / "complete.json", checkpoint_files.describe(newest) | changed)
    with pytest.raises(pl.UsageError, match=r"complete\.json lacks an entry that resuming needs"):
        EarlierPart.of(folder)


@pytest.mark.parametrize("algorithm", [3, "hogwld", "leashed("])
def test_an_algorithm_that_there_is_not(algorithm, run):
    folder = run("leashed")
    rewrite_json(folder / "config.json", algorithm=algorithm)
    with pytest.raises(pl.UsageError, match=r"config\.json names an unknown algorithm"):
        EarlierPart.of(folder)


def test_a_checkpoint_is_read_by_its_own_algorithm(run):
    """A run resumed with hogwild was killed before its first checkpoint: the checkpoint is still of all-reduce."""
    folder = run("all-reduce")
    rewrite_json(folder / "config.json", algorithm="hogwild")
    result = resumed(folder, "hogwild").result
    assert "The run continues with hogwild; until version 20 it was all-reduce." in result["notes"]
    assert result["records_lost"] == 0


def test_waiting_gradients_of_a_killed_loop_are_not_lost(tmp_path):
    """Until it ends, the config of a user's loop does not name the algorithm; the checkpoint does."""
    algorithm = "parameter-server(apply=delayed(delay=constant(updates_late=20)))"
    with pytest.warns(OverrideWarning):
        pl.launch(train, workers=2, backend="threads", algorithm=algorithm, limit_samples=120, out=tmp_path)
    whole = EarlierPart.of(tmp_path)
    rewrite_json(tmp_path / "config.json", algorithm=None)
    killed = EarlierPart.of(tmp_path)
    assert killed.notes == whole.notes == ()
    assert killed.run.result == whole.run.result


@pytest.mark.parametrize("algorithm", [None, Hogwild()])
def test_a_placed_run_needs_its_plan(algorithm, made):
    earlier = dataclasses.replace(EarlierPart.of(made("leashed")), algorithm=PlacedProgram())
    with pytest.raises(
        pl.UsageError, match=r"started with a plan and without an algorithm: resume it with launch\(plan="
    ):
        earlier.change_to(algorithm, 2)


def test_a_run_of_before_checksums_is_refused_in_one_sentence(run):
    folder = run("leashed")
    newest = checkpoint_files.newest(folder / "checkpoint")
    about = json.loads((newest / "complete.json").read_text())
    kept = {key: value for key, value in about.items() if not key.startswith("sha256")}
    (newest / "complete.json").write_text(json.dumps(kept))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(pl.UsageError) as raised:
        resumed(folder, "leashed")
    raised.value.__traceback__ = None
    assert str(raised.value) == (
        f"The checkpoint {newest} has no checksums: an earlier version of Paceline wrote it, or it is damaged; start the run"
        " again without it."
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("version", [2**40, 2**60])
def test_a_version_without_end_needs_no_memory(version, run):
    folder = run("leashed")
    rewrite(checkpoint_files.newest(folder / "checkpoint"), checkpoint_files.PARAMETERS, version=version)
    if version < 2**53:
        assert EarlierPart.of(folder).run.result["records_lost"] == version - 40
    else:
        with pytest.raises(pl.UsageError, match=r"parameters\.pt holds a value that no run writes"):
            EarlierPart.of(folder)
