import json


def configurations(training):
    return [(call.config.algorithm, call.config.workers, call.config.seed) for call in training.trained]


def test_every_algorithm_with_every_number_of_workers(run, training):
    arguments = "--algorithm hogwild,hogwild(copy=true) --algorithm sequential --workers 1,2 --out here"
    result = run("compare", *arguments.split())
    assert result.exit_code == 0, result.output
    assert configurations(training) == [
        ("hogwild", 1, 0),
        ("hogwild", 2, 0),
        ("hogwild(copy=true)", 1, 0),
        ("hogwild(copy=true)", 2, 0),
        ("sequential", 1, 0),
    ]
    assert "sequential runs with 1 worker at most" in result.stderr
    assert len({call.out for call in training.trained}) == 5
    ((runs, path, _),) = training.reported
    assert len(runs) == 5
    assert str(path) == "here/report.html"
    assert "TABLE of 5 runs" in result.stdout


def test_repeats_take_the_next_seeds(run, training):
    run("compare", "--algorithm", "hogwild", "--repeats", "3", "--seed", "7")
    assert configurations(training) == [("hogwild", 2, 7), ("hogwild", 2, 8), ("hogwild", 2, 9)]


def test_a_crashed_run_does_not_stop_the_rest(run, training):
    training.raises["hogwild"] = RuntimeError("worker 1 fell over")
    result = run("compare", "--algorithm", "hogwild,sequential", "--json")
    assert result.exit_code == 1
    crashed, fine = json.loads(result.stdout)
    assert (crashed["outcome"], fine["outcome"]) == ("crashed", "stopped")
    assert "worker 1 fell over" in crashed["outcome_reason"]
    assert "worker 1 fell over" in result.stderr


def test_json_is_stdouts_only_line(run, training):
    result = run("compare", "--algorithm", "hogwild", "--json")
    assert result.stdout.count("\n") == 1
    assert [one["algorithm"] for one in json.loads(result.stdout)] == ["hogwild"]
