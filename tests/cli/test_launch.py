"""What `paceline launch` and `paceline key` refuse, before any worker starts."""

import pytest

from rewritten import write_checked

BAD = [
    ("--workers 0 -- script.py", "--workers must be 1 or more, not 0"),
    ("--of 0 -- script.py", "--of must be 1 or more, not 0"),
    ("--of 1 -- script.py", "has 1 workers in all, fewer than the 2 to start here"),
    ("--deadline 0 -- script.py", "--deadline must be 1 or more"),
    ("-- missing.py", "There is no script missing.py"),
    ("--join 10.0.0.1 -- script.py", "must be HOST:PORT"),
    ("--join 127.0.0.1:99999 -- script.py", "must be HOST:PORT"),
    ("--join 10.0.0.1:29400, -- script.py", "must be HOST:PORT"),
    ("--join 192.0.2.1:29400 -- script.py", "make a key with `paceline key FILE`"),
    ("--join 192.0.2.1:29400 --key none.key -- script.py", "Cannot read the key file none.key"),
    (
        "--algorithm all-reduce(sharded=true) -- script.py",
        "choose all-reduce or ad-psgd, or start all-reduce(sharded=true) with",
    ),
    ("--algorithm parameter-server -- script.py", "needs servers, which workers that join do not start"),
    ("--algorithm hogwild -- script.py", "works on memory that all workers share"),
    ("--target-accuracy 0.9 -- script.py", "--target-accuracy is for a function"),
    ("--limit 5 -- script.py", "--limit is for a function"),
    ("--slow 0:10 -- script.py", "--slow is for a function"),
    ("--resume runs/one -- script.py", "--resume is for a function"),
    ("script.py:train --resume none", "--resume none is not a run's folder"),
    ("script.py:train --join 10.0.0.1:29400", "--join is for scripts"),
    ("script.py:train --of 2", "--of is for scripts"),
    ("script.py:train --slow ten", "--slow must be WORKER:FACTOR, as 0:100, not 'ten'"),
    ("script.py:train --slow 2:10", "slow names worker 2, but there are 2 workers"),
    ("script.py:train --limit 0", "--limit must be a number above 0"),
    ("script.py:train --target-accuracy 96", "write 0.95 for 95 %"),
    ("script.py:train --algorithm hogwil", "Did you mean 'hogwild'?"),
    ("script.py:train --algorithm sequential", "sequential"),
    ("missing.py:train", "File missing.py does not exist"),
    ("script.py:train", "File script.py failed at line 1: AssertionError"),
]


@pytest.mark.parametrize(("options", "says"), BAD, ids=[options for options, _ in BAD])
def test_refused(run, tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("raise AssertionError")
    result = run("launch", *options.split())
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.startswith("paceline: ")
    assert result.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"script.py"}  # less Python's own


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "config.json is damaged"),
        ("{}", "config.json is damaged, or an earlier version of Paceline wrote it: its checksum"),
        ({"task": "digits-mlp", "workers": 2}, "is a run of a task: resume it with `paceline train --resume old`"),
        ({"limit_samples": None, "workers": "many"}, "config.json is damaged: --workers"),
        ({"limit_samples": None, "slow": [3]}, "config.json is damaged: slow maps workers to factors"),
        ({"limit_samples": None, "workers": 2, "slow": {"4": 2.0}}, "config.json is damaged: slow names worker 4"),
    ],
)
def test_what_cannot_go_on_is_refused(run, tmp_path, monkeypatch, config, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old" / "checkpoint").mkdir(parents=True)
    path = tmp_path / "old" / "config.json"
    path.write_text(config) if isinstance(config, str) else write_checked(path, config)
    before = path.read_text()
    result = run("launch", "script.py:train", "--resume", "old")
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert path.read_text() == before


def test_a_key_file_is_private_and_never_overwritten(run, tmp_path):
    path = tmp_path / "run.key"
    assert run("key", str(path)).exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    again = run("key", str(path))
    assert again.exit_code == 2
    assert "File exists" in again.stderr
    assert path.read_bytes() == before
