"""What several tests of simulated clusters ask for."""

import pytest

from paceline.errors import UsageError
from paceline.simulator import Cluster


@pytest.fixture
def refusal(tmp_path):
    """A function from a cluster file's text to the one line that refuses it."""

    def refused(text):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        with pytest.raises(UsageError) as caught:
            Cluster.load(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refused
