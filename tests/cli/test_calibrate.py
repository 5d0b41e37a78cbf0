"""What `paceline calibrate` refuses before it measures anything."""

import pytest


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--batch-size 0", "--batch-size must be 1 or more"),
        ("--workers 0", "--workers must be 1 or more"),
        ("--data missing", "--data missing is not a folder"),
        ("--out here.txt", "a cluster file is .toml or .json"),
        ("--out missing/here.toml", "there is no folder missing; make it first"),
        ("--out folder.toml --force", "is a folder; name a file"),
        ("--out old.toml", "--out old.toml exists; add --force to replace it, or name another file"),
        ("--task digits", "Did you mean 'digits-mlp'?"),
        ("--quick --batch-size 100000", "1437 training samples; choose --batch-size up to that"),
    ],
)
def test_refused(run, tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "old.toml").write_text("workers = 3\n")
    result = run("calibrate", *options.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr.splitlines()[-1]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder.toml", "old.toml"]
