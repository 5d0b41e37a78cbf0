import subprocess
import sys
from pathlib import Path

import paceline.memory

CHECK = """
import sys
import paceline.memory
assert "numba" not in sys.modules and "torch" not in sys.modules, "importing the package alone must stay cheap"
paceline.memory.warm_up()
print(*(name.removeprefix("paceline.memory.") for name in sys.modules if name.startswith("paceline.memory.")))
"""


def test_warming_up_loads_every_module_and_importing_the_package_none():
    loaded = subprocess.run([sys.executable, "-c", CHECK], check=True, capture_output=True, text=True).stdout.split()
    files = Path(paceline.memory.__file__).parent.glob("*.py")
    assert set(loaded) == {file.stem for file in files} - {"__init__"}
