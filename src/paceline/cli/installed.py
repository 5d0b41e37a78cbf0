"""Which of the packages that Paceline works with are installed, without importing any of them."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path

#: `doctor`'s name for it -> the package, its purpose, what to install.
INTEGRATIONS: dict[str, tuple[str, str, str]] = {
    "Lightning": ("lightning", "its Trainer's strategy", "'paceline[lightning]'"),
    "notebooks": ("cloudpickle", "launching a notebook's functions", "'paceline[notebook]'"),
    "TensorBoard": ("tensorboard", "--tensorboard", "'paceline[tensorboard]'"),
    "Spark": ("pyspark", "DeepDist in Spark's tasks", "'paceline[spark]'"),
    "Ray": ("ray", "workers in Ray Train", "'ray[train]'"),
    "Accelerate": ("accelerate", "loops that use it", "accelerate"),
}


def integrations() -> dict[str, tuple[str, str]]:
    """`doctor`'s name for it -> the version found, and the remedy, empty if nothing is missing."""
    found: dict[str, tuple[str, str]] = {}
    for name, (package, purpose, needed) in INTEGRATIONS.items():
        try:
            told, remedy = f"{package} {metadata.version(package)}", ""
        except metadata.PackageNotFoundError:
            told, remedy = f"Not installed, and needed only for {purpose}", f"pip install {needed}"
        if name == "Spark" and not remedy:
            version = java()
            told += f", Java {version}" if version else ", and no Java, which it needs"
            remedy = "" if version else "Install Java 17 or later."
        found[name] = (f"{told}.", remedy)
    return found


def java() -> str | None:
    """Java's version, from its installation; None: not installed; "of an unknown version": the installation does not say."""
    home = os.environ.get("JAVA_HOME")
    program = shutil.which("java", path=f"{home}/bin" if home else None)
    if program is None:
        return None
    for folder in Path(program).resolve().parents[1:3]:  # a runtime may be in `jre/` of a JDK
        if (folder / "release").is_file():
            for line in (folder / "release").read_text(errors="replace").splitlines():
                if line.startswith("JAVA_VERSION="):
                    return line.partition("=")[2].strip('"')
    return "of an unknown version"
