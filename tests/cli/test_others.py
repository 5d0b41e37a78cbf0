"""`paceline algorithms`, `paceline doctor`, help, and the command as a process."""

import json
import shutil
import subprocess
import sys
import tempfile

import pytest

from forked import AGAINST_HANGS_S
from paceline.cli import doctor
from paceline.system import compilation, limits


def test_algorithms_table_and_filter(run, training):
    result = run("algorithms")
    assert "hogwild(copy=false)" in result.stdout
    assert "Racing updates." in result.stdout
    assert "More words" not in result.stdout
    (row,) = json.loads(run("algorithms", "--tolerates", "kill", "--json").stdout)
    assert row == {
        "name": "hogwild",
        "spec": "hogwild(copy=false)",
        "summary": "Racing updates.",
        "tolerates": ["kill", "straggler"],
    }
    refused = run("algorithms", "--tolerates", "fire")
    assert refused.exit_code == 2
    assert "choose kill or straggler" in refused.stderr


def test_doctor_reports_every_check_even_if_one_fails(run, monkeypatch):
    monkeypatch.setattr(doctor, "_atomics", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "_fork_server", lambda: "Yes.")
    result = run("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert not checks["atomic operations"]["works"]
    assert "ZeroDivisionError" in checks["atomic operations"]["finding"]
    assert checks["torch"]["works"]
    text = run("doctor")
    assert "fails  atomic operations: ZeroDivisionError" in text.stdout
    assert "works  starting workers: Yes." in text.stdout


def test_doctor_on_other_machines(monkeypatch, tmp_path):
    for name in ("node0", "node1"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(doctor, "_NODES", tmp_path)
    assert doctor._nodes().startswith("2;")
    monkeypatch.setattr(doctor, "_NODES", tmp_path / "missing")
    assert "treated as 1" in doctor._nodes()


def test_doctor_in_a_small_container(monkeypatch):
    monkeypatch.setattr(limits, "memory_limit", lambda: 2**30)
    monkeypatch.setattr(doctor, "available_bytes", lambda **which: 2**30)
    monkeypatch.setattr(limits, "cpu_quota", lambda: 0.5)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(2**26, 0, 2**26))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    monkeypatch.setattr(compilation._Cache, "__init__", lambda *_: (_ for _ in ()).throw(RuntimeError))
    for name in ("_fork_server", "_atomics"):
        monkeypatch.setattr(doctor, name, lambda: "Yes.")
    checks = {check.name: check for check in doctor.examine()}
    assert "a quota allows the time of 0.5" in checks["cores"].finding
    assert "A container may use 1.0 GiB." in checks["memory"].finding
    assert "fewer workers" in checks["memory"].remedy
    assert "64 MiB" in checks["loader processes"].finding
    assert "--shm-size" in checks["loader processes"].remedy
    assert not checks["temporary files"].works
    assert "TMPDIR" in checks["temporary files"].finding
    assert "NUMBA_CACHE_DIR" in checks["sparse kernels"].remedy


@pytest.mark.parametrize("verb", ["train", "compare", "simulate", "calibrate", "algorithms", "doctor"])
def test_help_fits_a_screen_and_has_an_example(run, monkeypatch, verb):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    text = run(verb, "--help").stdout
    assert f"paceline {verb}" in text.partition("Example:")[2]
    assert len(text.splitlines()) <= 48


def test_the_command_starts_without_torch():
    code = (
        "import sys\nfrom paceline.cli.app import main\n"
        "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=AGAINST_HANGS_S
    )
    assert done.returncode == 0
    assert "compare" in done.stdout
    assert done.stderr == "False\n"


def test_a_mistake_in_a_real_process_is_one_line():
    code = "from paceline.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--workers", "0"], capture_output=True, text=True, timeout=AGAINST_HANGS_S
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "paceline: --workers must be 1 or more, not 0.\n"


def test_a_misspelt_algorithm_is_told_before_what_trains_is_loaded(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "paceline.run.train", None)
    for verb in ("train", "compare"):
        done = run(verb, "--algorithm", "hogwld")
        assert done.exit_code == 2
        assert "Did you mean 'hogwild'?" in done.stderr


def test_version(run):
    assert run("--version").stdout.startswith("paceline 0.")


@pytest.mark.parametrize(
    "words",
    ["algorithms placed", "cite placed", "train --algorithm placed", "compare --algorithm placed,hogwild",
     "simulate --algorithm placed", "advise loop.py:train --algorithm placed --target-loss 0.1",
     "launch --algorithm placed -- loop.py"],
)  # fmt: skip
def test_an_algorithm_that_launch_alone_chooses_is_unknown(run, monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text("def train(): ...")
    done = run(*words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Unknown algorithm 'placed'." in done.stderr
