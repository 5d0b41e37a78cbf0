import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from observe.synthetic import empty, make_run
from paceline.errors import UsageError
from paceline.records.run_data import RunData, read_events, write_events, write_json
from paceline.records.step_record import CODED, PARTNER, RECORD_DTYPE
from paceline.run.earlier_part import EarlierPart


def same(left, right):
    return all(
        np.array_equal(left[name], right[name], equal_nan=left[name].dtype.kind == "f") for name in RECORD_DTYPE.names
    )


def test_a_run_comes_back_as_it_was_saved(tmp_path):
    run = make_run(slow=2)
    run.records[7] = empty()
    loaded = RunData.load(run.save(tmp_path / "run"))
    assert loaded.records.keys() == run.records.keys()
    assert all(same(loaded.records[worker], run.records[worker]) for worker in run.records)
    assert loaded.result == run.result
    assert loaded.evaluations == run.evaluations
    assert loaded.config["slow"] == {"2": 8.0}  # JSON has string keys
    assert not list((tmp_path / "run").glob("*.tmp"))
    assert not list((tmp_path / "run").glob(".*"))


def test_saving_again_with_fewer_workers_leaves_none_of_the_old_events(tmp_path):
    make_run(workers=5, steps=5).save(tmp_path)
    make_run(workers=3, steps=5).save(tmp_path)
    assert RunData.load(tmp_path).records.keys() == {0, 1, 2}


@pytest.mark.parametrize("lines", [1, 3, 7, 10, 1000])
def test_workers_are_written_in_groups_and_each_gets_its_own_lines(tmp_path, monkeypatch, lines):
    monkeypatch.setattr("paceline.records.run_data._LINES_PER_CHUNK", lines)
    run = make_run(workers=5, steps=4, slow=1)
    run.records[3], run.records[9] = empty(), np.concatenate([run.records[2]] * 3)
    loaded = RunData.load(run.save(tmp_path))
    assert loaded.records.keys() == run.records.keys()
    assert all(same(loaded.records[worker], run.records[worker]) for worker in run.records)


@pytest.fixture
def few_files(monkeypatch):
    monkeypatch.setattr("paceline.records.run_data._MOST_FILES", 3)


@pytest.mark.parametrize("lines", [1, 7, 1000])
def test_many_workers_share_files_and_come_back_as_they_were(tmp_path, monkeypatch, few_files, lines):
    monkeypatch.setattr("paceline.records.run_data._LINES_PER_CHUNK", lines)
    run = make_run(workers=6, steps=4, slow=1)
    run.records[2] = run.records[9] = empty()  # 9: a gap before it
    run.records[5]["loss"][1] = np.nan
    loaded = RunData.load(run.save(tmp_path))
    assert list(loaded.records) == [0, 1, 2, 3, 4, 5, 9]
    assert all(same(loaded.records[worker], run.records[worker]) for worker in run.records)


def test_lines_that_workers_share_say_whose_they_are(tmp_path, few_files):
    make_run(workers=3, steps=5).save(tmp_path)
    make_run(workers=4, steps=5).save(tmp_path)
    (file,) = tmp_path.glob("events-*")  # none of the first run's is left
    assert file.name == "events-0-3.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    names = [name for name in RECORD_DTYPE.names if name not in CODED + PARTNER]  # nothing was coded, or sent
    assert [list(event) for event in events] == [["worker", *names]] * len(events)
    of_worker = [sum(event["worker"] == worker for event in events) for worker in range(4)]
    assert of_worker == [len(own) for own in make_run(workers=4, steps=5).records.values()]


@pytest.mark.parametrize(("written", "instead"), [('"worker": 1', '"worker": 7'), ('"worker": 3', '"worker": 0')])
def test_a_shared_file_with_somebody_elses_lines_is_refused(tmp_path, few_files, written, instead):
    make_run(workers=4, steps=5).save(tmp_path)
    file = tmp_path / "events-0-3.jsonl"
    file.write_text(file.read_text().replace(written, instead))
    with pytest.raises(
        UsageError, match=r"events-0-3\.jsonl: its lines must be those of workers 0 to 3, in this order"
    ):
        RunData.load(tmp_path)


def test_a_worker_with_events_in_two_files_is_refused(tmp_path, few_files):
    make_run(workers=4, steps=5).save(tmp_path)
    write_events(tmp_path / "events-2.jsonl", make_run(workers=4, steps=5).records[2])
    with pytest.raises(UsageError, match="another file also has events of worker 2"):
        RunData.load(tmp_path)


def test_a_shared_file_that_was_cut_short_is_refused(tmp_path, few_files):
    """It is never written bit by bit, and whole workers would be missing without a word."""
    make_run(workers=4, steps=5).save(tmp_path)
    file = tmp_path / "events-0-3.jsonl"
    file.write_text(file.read_text()[:-300])
    with pytest.raises(UsageError, match=r"events-0-3\.jsonl: its lines must be those"):
        RunData.load(tmp_path)


def test_while_a_run_is_saved_over_another_one_there_is_no_result(tmp_path, monkeypatch):
    make_run(workers=2, steps=5).save(tmp_path)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.records.run_data.save_events", killed)
    with pytest.raises(KeyboardInterrupt):
        make_run(workers=3, steps=5).save(tmp_path)
    assert RunData.load(tmp_path).result == {}


def test_what_a_resumed_run_keeps_of_its_earlier_part_is_in_no_other_file(tmp_path, few_files):
    made = make_run(workers=4, steps=5)
    made.save(tmp_path)
    earlier = RunData(made.config, {}, {worker: own[:2] for worker, own in made.records.items()})
    EarlierPart(earlier).keep(tmp_path)
    loaded = RunData.load(tmp_path)
    assert all(same(loaded.records[worker], earlier.records[worker]) for worker in range(4))


def test_a_damaged_line_of_a_shared_file_is_named(tmp_path, few_files):
    make_run(workers=4, steps=5).save(tmp_path)
    file = tmp_path / "events-0-3.jsonl"
    first, second, *rest = file.read_text().splitlines(keepends=True)
    file.write_text(first + second.replace('"worker": 0, ', "") + "".join(rest))
    with pytest.raises(UsageError, match=r"events-0-3\.jsonl, line 2: the event has no 'worker'"):
        RunData.load(tmp_path)


INTEGERS = [name for name in RECORD_DTYPE.names if RECORD_DTYPE[name].kind == "i"]
FLOATS = [name for name in RECORD_DTYPE.names if RECORD_DTYPE[name].kind == "f"]


@given(
    hnp.arrays(np.int64, st.tuples(st.integers(0, 5), st.just(len(INTEGERS)))),
    st.data(),
)
def test_events_round_trip_exactly(tmp_path_factory, integers, data):
    floats = data.draw(hnp.arrays(np.float64, (len(integers), len(FLOATS))))
    records = np.zeros(len(integers), RECORD_DTYPE)
    for names, columns in ((INTEGERS, integers.T), (FLOATS, floats.T)):
        for name, column in zip(names, columns, strict=True):
            records[name] = column
    path = tmp_path_factory.mktemp("events") / "events-0.jsonl"
    write_events(path, records)
    assert same(read_events(path), records)


@pytest.mark.parametrize(("name", "group"), [(name, group) for group in (CODED, PARTNER) for name in group])
def test_what_was_not_coded_or_sent_is_left_out(name, group, tmp_path):
    """So it is in files that are older than these figures."""
    path, records = tmp_path / "events-0.jsonl", make_run(steps=5).records[0]
    records = records.copy()
    for one in CODED + PARTNER:
        records[one] = 0
    write_events(path, records)
    assert not [one for one in group if one in path.read_text()]
    assert same(read_events(path), records)
    records[name][2] = 7
    write_events(path, records)
    assert name in path.read_text()
    assert same(read_events(path), records)


def test_every_line_is_standard_json_with_the_names_of_the_record(tmp_path):
    records = make_run(steps=3).records[0][:3].copy()
    records["loss"] = [np.nan, np.inf, 0.5]
    records["coded_bytes"] = records["partner"] = 4  # else their names are left out
    write_events(tmp_path / "events-0.jsonl", records)

    def refuse(constant):
        raise AssertionError(constant)

    lines = (tmp_path / "events-0.jsonl").read_text().splitlines()
    events = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [list(event) for event in events] == [list(RECORD_DTYPE.names)] * 3
    assert [event["loss"] for event in events] == [None, float("inf"), 0.5]


@pytest.mark.parametrize(("cut", "kept"), [(1, 3), (2, 2), (40, 2)], ids=["no line end", "no brace", "in the middle"])
def test_a_last_line_cut_short_is_tolerated(tmp_path, cut, kept):
    path = tmp_path / "events-0.jsonl"
    records = make_run(steps=3).records[0][:3]
    write_events(path, records)
    path.write_text(path.read_text()[:-cut])
    assert same(read_events(path), records[:kept])


@pytest.mark.parametrize("line", ["", "[1]", "{}", '{"step": "x"}', "{} , {}", "nonsense"])
def test_a_damaged_line_elsewhere_is_named(tmp_path, line):
    path = tmp_path / "events-0.jsonl"
    write_events(path, make_run(steps=3).records[0][:3])
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(first + line + "\n" + "".join(rest))
    with pytest.raises(UsageError, match=r"events-0\.jsonl, line 2"):
        read_events(path)


def test_a_run_killed_before_its_result_still_loads(tmp_path):
    make_run(steps=5).save(tmp_path)
    (tmp_path / "result.json").unlink()
    (tmp_path / "evaluations.json").unlink()
    run = RunData.load(tmp_path)
    assert run.result == {}
    assert run.evaluations == []
    assert len(run.records) == 4


@pytest.mark.parametrize("change", [lambda one: one.pop("test_accuracy"), lambda one: one.update(version="12")])
def test_a_damaged_evaluation_is_named(change, tmp_path):
    make_run(steps=5).save(tmp_path)
    path = tmp_path / "evaluations.json"
    found = json.loads(path.read_text())
    change(found[0])
    path.write_text(json.dumps(found))
    with pytest.raises(UsageError, match=r"evaluations\.json is damaged"):
        RunData.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("version", "12"), ("restarts", None), ("workers_lost", 3), ("view_changes", {}), ("restarts", True)],
)
def test_a_damaged_result_is_named(name, value, tmp_path):
    make_run(steps=5).save(tmp_path)
    path = tmp_path / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(UsageError, match=rf"result\.json is damaged: its {name} is {value!r}\."):
        RunData.load(tmp_path)


def test_what_is_not_a_run_says_so(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        RunData.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="damaged"):
        RunData.load(tmp_path)
    with pytest.raises(UsageError, match="RECORD_DTYPE"):
        write_events(tmp_path / "events-0.jsonl", np.zeros(3))


def test_json_is_standard_and_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": float("nan"), "b": np.float32(1), "c": np.arange(2), 3: (tmp_path,), "d": {np.int64(1)}})
    text = path.read_text()
    assert json.loads(text) == {"a": None, "b": 1.0, "c": [0, 1], "3": [str(tmp_path)], "d": [1]}

    class Bad:
        def __str__(self):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_json(path, Bad())
    assert path.read_text() == text
