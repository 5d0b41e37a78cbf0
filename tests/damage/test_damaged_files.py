"""Whatever is damaged of the files that a verb reads: it does its work or says what is wrong in one sentence, and soon.

make soak                                     500 damages
DAMAGE_SEED=7 pytest -m soak tests/damage     500 others
"""

import contextlib
import json
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import soak_results
from damage.damages import copied, draw, files_of
from damage.subjects import SUBJECTS, made, reads
from paceline.cli.app import app
from paceline.system import tensor_files

SEED = int(os.environ.get("DAMAGE_SEED", "1"))
SHORT, LONG = 32, 500
LIMIT_S = 30.0  # a hang


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """All of them, as they should be, by name; made when first asked for."""
    folder, known = tmp_path_factory.mktemp("whole"), {}

    def subject(name):
        if name not in known:
            known[name] = made(name, folder / name.replace(" ", "-"))
        return known[name]

    return subject


class HungError(BaseException):
    """Nothing that a verb might catch."""


@contextlib.contextmanager
def limited():
    """Raises `HungError` in what takes longer than `LIMIT_S`."""

    def hung(signum, frame):
        raise HungError

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def contents(folder):
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


def what_is_wrong(words, folder, out, codes):
    """Runs a verb; returns how it went other than it may, "" if it did not, and counts its exit code."""
    words = [word.format(folder, out=out) for word in words]
    before = contents(folder)
    try:
        with limited():
            result = CliRunner().invoke(app, words, prog_name="paceline")
    except HungError:
        return f"longer than {LIMIT_S:.0f} s"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__}: {result.exception}"
    codes[str(result.exit_code)] += 1
    if "Traceback" in result.output:
        return result.output[-500:]
    said = [line for line in result.stderr.splitlines() if line.startswith("paceline: ")]
    if result.exit_code not in (0, 2):
        # a fit of damaged numbers may diverge, and says so
        return "" if result.exit_code == 1 and said and "diverged" in said[0] else f"code {result.exit_code}: {said}"
    if result.exit_code == 2:
        if len(said) != 1 or not said[0].endswith((".", "?")) or result.stderr.splitlines()[-1] != said[0]:
            return f"not one sentence: {result.stderr!r}"
        if contents(folder) != before or Path(out).exists():
            return f"refused, and wrote all the same: {said}"
    return half_written(folder, before) or half_written(Path(out), {})


def half_written(folder, before):
    """The first file that was written, and is not whole."""
    for path in folder.rglob("*") if folder.exists() else ():
        name = str(path.relative_to(folder))
        if path.name.endswith(".tmp") or path.name == ".lock":
            return f"left {name}"
        if path.is_file() and before.get(name) != path.read_bytes():
            try:
                if path.suffix == ".json":
                    json.loads(path.read_text())
                elif path.suffix == ".pt":
                    tensor_files.load(path, "the file")
            except ValueError as error:
                return f"half of {name}: {error}"
    return ""


@pytest.mark.parametrize("name", SUBJECTS)
def test_undamaged_ones_are_read(name, subjects, tmp_path):
    for number, words in enumerate(SUBJECTS[name][1]):
        folder = copied(subjects(name), tmp_path / str(number))
        result = CliRunner().invoke(
            app, [word.format(folder, out=tmp_path / f"out-{number}") for word in words], prog_name="paceline"
        )
        assert result.exit_code == 0, (words, result.output)


def damaged(name, number, seed, subjects, tmp_path):
    """Damages a subject so many times, each time anew, and runs what reads the damaged file; figures, and what went wrong."""
    whole, codes = subjects(name), Counter()
    failures, longest_s = [], 0.0
    for at, damage in enumerate(draw(files_of(whole), number, seed)):
        for verb, words in enumerate(SUBJECTS[name][1]):
            if not reads(words, damage.file):
                continue
            folder = copied(whole, tmp_path / f"{at}-{verb}")
            damage.apply(folder)
            begun_s = time.monotonic()
            wrong = what_is_wrong(words, folder, tmp_path / f"{at}-{verb}-out", codes)
            longest_s = max(longest_s, time.monotonic() - begun_s)
            if wrong:
                failures.append(f"{name}: {damage}, {' '.join(words)}: {wrong}")
            shutil.rmtree(folder)
    figures = {"damages": number, "exit_codes": dict(sorted(codes.items())), "longest_s": round(longest_s, 1)}
    return figures, failures


@pytest.mark.parametrize("name", SUBJECTS)
def test_some_damages(name, subjects, tmp_path):
    _, failures = damaged(name, SHORT // len(SUBJECTS), SEED, subjects, tmp_path)
    assert not failures, "\n".join(failures)


@pytest.mark.soak
def test_five_hundred_damages(subjects, tmp_path):
    """Writes to PACELINE_SOAK_RESULTS how the verbs ended; DAMAGE_SEED draws others."""
    begun_s, found, failures = time.monotonic(), {}, []
    each, more = divmod(LONG, len(SUBJECTS))
    for at, name in enumerate(SUBJECTS):
        (tmp_path / str(at)).mkdir()
        found[name], wrong = damaged(name, each + (at < more), SEED, subjects, tmp_path / str(at))
        failures += wrong
    figures = {
        "damages": sum(one["damages"] for one in found.values()),
        "verbs_run": sum(sum(one["exit_codes"].values()) for one in found.values()),
        "wrong": len(failures),
        "took_s": round(time.monotonic() - begun_s, 1),
        **found,
    }
    soak_results.keep("soak_damaged_files", f"seed {SEED}", figures)
    assert not failures, f"{len(failures)} with seed {SEED}:\n" + "\n".join(failures)
