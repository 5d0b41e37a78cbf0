"""Tests the wheel with the oldest and the newest PyTorch, NumPy, pandas and PyArrow; writes docs/tested_versions.md.

Each environment is made in a temporary folder: up to 7 GB, where pip finds only CUDA's builds. Arguments such as
`3.12-newest` choose some of ENVIRONMENTS; the rows of the others stay. `--check` runs no test, and fails if a file in
WATCHED has changed since the table was last committed.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TABLE = "docs/tested_versions.md"
WATCHED = ["src/paceline/system/torch_internals.py", "constraints.txt"]
ENVIRONMENTS = ["3.11-oldest", "3.11-newest", "3.12-newest", "3.13-newest"]
VARIED = ("torch", "numpy", "pandas", "pyarrow")  # the newest pandas and PyArrow refuse NumPy 1
TESTS = {
    "quick": ["tests", *(f"--ignore=tests/{one}" for one in ("contracts", "documentation", "processes"))],
    "contracts": ["tests/contracts"],
    "processes": ["tests/processes/test_torchrun.py", "tests/processes/test_survivors.py"],
}
OPTIONS = shlex.split("-q -m 'not soak' -n 2 --dist loadfile --no-loadscope-reorder -p no:cacheprovider")
RELEASES = """import json, platform, numpy, torch
print(json.dumps([platform.python_version(), torch.__version__, numpy.__version__]))"""


def has_interpreter(version: str) -> bool:
    """Whether `python3.12` runs; a shim of pyenv can exist without its interpreter."""
    return subprocess.run(["env", f"python{version}", "--version"], check=False, capture_output=True).returncode == 0


def install(folder: Path, environment: str) -> Path:
    """Copies the checkout without the package's source, and installs its wheel; returns the environment's Python."""
    version, age = environment.split("-")
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={folder}/checkout/"], cwd=ROOT, check=True)
    subprocess.run([f"python{version}", "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "checkout"], check=True)
    shutil.rmtree(folder / "checkout" / "src")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["study"]
    varied = [one for one in needed if one.startswith(VARIED)]
    releases = [one.replace(">=", "==") + ".*" if age == "oldest" else one for one in varied]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in pinned if not line.startswith(VARIED)))
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--constraint", constraints, f"{wheel}[dev]", *releases], check=True)
    return python


def test(python: Path, environment: str, group: str) -> int:
    """Runs a group of tests and writes its row; returns the number of failures."""
    report = python.with_name(f"{group}.xml")
    words = ["-m", "pytest", *OPTIONS, f"--junitxml={report}", *TESTS[group]]
    subprocess.run([python, *words], cwd=python.parents[2] / "checkout", check=False)
    (found,) = ElementTree.parse(report).iter("testsuite")
    tests, skipped, failures, errors = (int(found.attrib[one]) for one in ("tests", "skipped", "failures", "errors"))
    failed = failures + errors
    releases = json.loads(subprocess.check_output([python, "-c", RELEASES], text=True))
    write_row(environment, group, [*releases, tests - skipped - failed, skipped, failed, date.today()])
    return failed


def write_row(environment: str, group: str, cells: list) -> None:
    """Replaces one row of the table."""
    start = f"| {environment} | {group} |"
    lines = (ROOT / TABLE).read_text().splitlines()
    (place,) = (i for i, line in enumerate(lines) if line.startswith(start))
    lines[place] = f"{start} {' | '.join(map(str, cells))} |"
    (ROOT / TABLE).write_text("\n".join(lines) + "\n")


def changed_later(root: Path) -> list[str]:
    """Watched files whose last commit is later than the last commit of a row of the table."""

    def last_commit(path: str, *options: str) -> int:
        words = ["git", "log", "-1", "--format=%ct", *options, "--", path]
        return int(subprocess.check_output(words, cwd=root, text=True) or 0)

    tested = last_commit(TABLE, "-G^\\| 3\\.")
    return [path for path in WATCHED if last_commit(path) > tested]


def main(arguments: list[str]) -> int:
    """Checks the table, or tests the named environments, all by default; returns the exit status."""
    if arguments == ["--check"]:
        late = changed_later(ROOT)
        if late:
            print(f"{', '.join(late)} changed after {TABLE}: make test-versions", file=sys.stderr)
        return bool(late)
    os.environ.pop("PYTHONPATH", None)
    failed = 0
    for environment in arguments or ENVIRONMENTS:
        if not has_interpreter(environment.split("-")[0]):
            for group in TESTS:
                write_row(environment, group, ["not run"])
            continue
        with tempfile.TemporaryDirectory() as folder:
            python = install(Path(folder), environment)
            failed += sum(test(python, environment, group) for group in TESTS)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
