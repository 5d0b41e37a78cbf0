"""Builds sdist and wheel, and uses the wheel in an empty environment and folder. pip fetches what that needs.

Small extras are installed one by one; of the large ones pip only chooses the releases.
"""

import os
import subprocess
import tarfile
import tempfile
import venv
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
MOST_BYTES = {".whl": 1_500_000, ".gz": 3_000_000}
LARGE_EXTRAS = {"dev", "docs", "lightning", "spark", "bench"}
LOOP = """import torch
import paceline as pl

def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.attach(model, optimizer) as worker:
        for x in worker.batches([torch.ones(8, 4)] * 20):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

if __name__ == "__main__":
    run = pl.launch(train, workers=2, algorithm="hogwild", out="runs/loop")
    assert run.result["steps"] == 20, run.result
"""
COMMANDS = [
    "paceline train --algorithm leashed --workers 2 --epochs 1 --out runs/trained",
    "paceline simulate --algorithm leashed --workers 4 --epochs 1 --out runs/simulated",
    "python loop.py",
]


def environment(folder: Path) -> Path:
    """Makes an empty environment; returns the folder of its programs."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


def build(folder: Path) -> Path:
    """Builds both, the wheel from the checkout and from the sdist; checks them and returns the wheel."""
    programs = environment(folder / "tools")
    subprocess.run([programs / "pip", "install", "--quiet", "build", "twine"], check=True)
    build_to = [programs / "python", "-m", "build", "--outdir"]
    subprocess.run([*build_to, folder / "dist", "--sdist", "--wheel", ROOT], check=True)
    (sdist,), (wheel,) = folder.glob("dist/*.tar.gz"), folder.glob("dist/*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    subprocess.run([*build_to, folder / "again", "--wheel", unpacked], check=True)
    assert contents(folder / "again" / wheel.name) == contents(wheel), "the sdist builds another wheel"
    subprocess.run([programs / "twine", "check", "--strict", sdist, wheel], check=True)
    for file in (sdist, wheel):
        print(f"{file.name}: {file.stat().st_size:,} bytes")
        assert file.stat().st_size <= MOST_BYTES[file.suffix], f"more than {MOST_BYTES[file.suffix]:,}"
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    """Names and bytes of a wheel's files."""
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check_contents(wheel: Path) -> list[str]:
    """Checks that the wheel holds the package of the checkout and nothing else; returns its extras."""
    found = contents(wheel)
    metadata = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    package = {name for name in found if not name.startswith(metadata)}
    tracked = set(subprocess.check_output(["git", "ls-files"], cwd=ROOT / "src", text=True).split())
    assert package == tracked, f"only in one of checkout and wheel: {package ^ tracked}"
    assert "paceline/py.typed" in package
    assert found[f"{metadata}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    return message_from_bytes(found[f"{metadata}/METADATA"]).get_all("Provides-Extra", [])


def use(wheel: Path, extras: list[str], folder: Path) -> None:
    """Trains, simulates and runs a loop without the checkout, and resolves every extra."""
    programs, empty = environment(folder / "user"), folder / "empty"
    subprocess.run([programs / "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
    install = [programs / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, wheel], check=True)
    empty.mkdir()
    (empty / "loop.py").write_text(LOOP)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    for command in COMMANDS:
        print(f"$ {command}", flush=True)
        subprocess.run(["env", f"PATH={path}", *command.split()], cwd=empty, check=True)
    for run in ("trained", "simulated", "loop"):
        assert (empty / "runs" / run / "report.html").stat().st_size
    for extra in extras:
        print(f"Extra {extra}", flush=True)
        subprocess.run([*install, *["--dry-run"] * (extra in LARGE_EXTRAS), f"{wheel}[{extra}]"], check=True)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        use(wheel, check_contents(wheel), Path(folder))
