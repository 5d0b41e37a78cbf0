"""What `paceline launch` and `paceline key` refuse, before any worker starts."""

import pytest

BAD = [
    ("--workers 0 -- script.py", "--workers must be 1 or more, not 0"),
    ("--of 0 -- script.py", "--of must be 1 or more, not 0"),
    ("--of 1 -- script.py", "has 1 workers in all, fewer than the 2 to start here"),
    ("--deadline 0 -- script.py", "--deadline must be 1 second or more"),
    ("-- missing.py", "There is no script missing.py"),
    ("--join 10.0.0.1 -- script.py", "written HOST:PORT"),
    ("--join 127.0.0.1:99999 -- script.py", "written HOST:PORT"),
    ("--join 192.0.2.1:29400 -- script.py", "make a key with `paceline key FILE`"),
    ("--join 192.0.2.1:29400 --key none.key -- script.py", "Cannot read the key file none.key"),
    ("--algorithm all-reduce -- script.py", "choose ad-psgd, or start all-reduce with torchrun"),
    ("--algorithm hogwild -- script.py", "works on memory that all workers share"),
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
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_key_file_is_private_and_never_overwritten(run, tmp_path):
    path = tmp_path / "run.key"
    assert run("key", str(path)).exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    again = run("key", str(path))
    assert again.exit_code == 2
    assert "File exists" in again.stderr
    assert path.read_bytes() == before
