"""Tests the wheel with the oldest and the newest PyTorch, or those named; adds the results to docs/tested_versions.md.

Each release gets an environment of its own in a temporary folder: up to 7 GB, where pip finds only CUDA's builds.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
import venv
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TESTS = {
    "quick": ["tests", *(f"--ignore=tests/{one}" for one in ("contracts", "documentation", "processes"))],
    "contracts": ["tests/contracts"],
    "processes": ["tests/processes/test_torchrun.py", "tests/processes/test_survivors.py"],
}
ABOUT = """import json, platform, numpy, torch
print(json.dumps([platform.python_version(), torch.__version__, numpy.__version__]))"""


def install(folder: Path, torch: str) -> Path:
    """Makes an environment with the wheel and a release of PyTorch; returns its Python."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    (folder / "constraints.txt").write_text("\n".join(line for line in pinned if not line.startswith("torch==")))
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--constraint", folder / "constraints.txt", f"{wheel}[dev]", torch], check=True)
    return python


def test(python: Path, name: str) -> int:
    """Runs a group of tests and adds a row to the table; returns the number of failures."""
    report = python.with_name("report.xml")
    words = ["-q", "-m", "not soak", "-n3", "--dist=loadfile", "-pno:cacheprovider", f"--junitxml={report}"]
    subprocess.run([python, "-m", "pytest", *words, *TESTS[name]], cwd=ROOT, check=False)
    (found,) = ElementTree.parse(report).iter("testsuite")
    tests, skipped, failures, errors = (int(found.attrib[one]) for one in ("tests", "skipped", "failures", "errors"))
    failed = failures + errors
    about = json.loads(subprocess.check_output([python, "-c", ABOUT], text=True))
    row = [date.today(), *about, name, tests - skipped - failed, skipped, failed]
    with (ROOT / "docs" / "tested_versions.md").open("a") as table:
        table.write(f"| {' | '.join(map(str, row))} |\n")
    return failed


if __name__ == "__main__":
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest,) = (one for one in needed if one.startswith("torch>="))
    failed = 0
    for release in sys.argv[1:] or [oldest.replace(">=", "==") + ".0", "torch"]:
        with tempfile.TemporaryDirectory() as folder:
            python = install(Path(folder), release)
            failed += sum(test(python, name) for name in TESTS)
    sys.exit(bool(failed))
