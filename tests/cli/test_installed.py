"""What `doctor` says of packages that Paceline works with: their versions or what to install, and none is imported."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from paceline.cli.installed import INTEGRATIONS, integrations, java

ROOT = Path(__file__).parents[2]


def test_each_has_its_version_or_what_to_install(monkeypatch):
    monkeypatch.setattr(metadata, "version", {"lightning": "2.6.6", "cloudpickle": "3.1"}.__getitem__)
    monkeypatch.setattr(metadata, "PackageNotFoundError", KeyError)
    found = integrations()
    assert found["Lightning"] == ("lightning 2.6.6.", "")
    assert found["notebooks"] == ("cloudpickle 3.1.", "")
    assert found["TensorBoard"] == (
        "Not installed, and needed only for --tensorboard.",
        "pip install 'paceline[tensorboard]'",
    )
    assert set(found) == {"Lightning", "notebooks", "TensorBoard", "Spark", "Ray", "Accelerate"}


def test_spark_is_told_with_its_java(monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, "version", lambda package: "4.3.0")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java() is None
    assert integrations()["Spark"] == ("pyspark 4.3.0, and no Java, which it needs.", "Install Java 17 or later.")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "java").chmod(0o755)
    assert java() == "of an unknown version"
    (tmp_path / "release").write_text('IMPLEMENTOR="X"\nJAVA_VERSION="17.0.9"\n')
    assert integrations()["Spark"] == ("pyspark 4.3.0, Java 17.0.9.", "")


def test_extras_that_are_named_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [needed for _, _, needed in INTEGRATIONS.values() if "paceline[" in needed]
    assert len(named) >= 3
    for one in named:
        extra = one.partition("[")[2].partition("]")[0]
        assert extra in extras
    assert all(
        package in " ".join(extras[needed.partition("[")[2].partition("]")[0]])
        for package, _, needed in INTEGRATIONS.values()
        if "paceline[" in needed
    )


def test_none_of_them_is_imported():
    code = (
        "import sys\nfrom paceline.cli.installed import INTEGRATIONS, integrations\nintegrations()\n"
        "print([one for one, *_ in INTEGRATIONS.values() if one in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
