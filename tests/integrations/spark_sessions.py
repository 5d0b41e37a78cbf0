"""Sessions of real Spark on this machine, for tests; and the end of the Java process behind them.

Who imports this is skipped, with the reason, where Spark cannot run.
"""

import contextlib
import os
import socket
import sys

import pytest

pytest.importorskip("pyspark", reason="needs the extra: pip install 'paceline[spark]'")
pytest.importorskip("pyarrow", reason="needs the extra: pip install 'paceline[spark]'")
from pyspark import SparkContext
from pyspark.sql import SparkSession

from paceline.cli.installed import java
from paceline.membership.join_point import JoinPoint

if java() is None:
    pytest.skip("Spark needs Java 17 or later", allow_module_level=True)


def session(master, **conf):
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .config("spark.log.level", "OFF")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.executorEnv.PYTHONPATH", os.pathsep.join(sys.path))  # where these tests' functions are found
    )
    for name, value in conf.items():
        builder = builder.config(f"spark.{name}", value)
    return builder.getOrCreate()


def end_java():
    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(60)
        SparkContext._gateway = SparkContext._jvm = None


@contextlib.contextmanager
def meetings_elsewhere():
    """Join points of a class that tells tasks an address where nobody listens; the class, and the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        elsewhere = f"127.0.0.1:{taken.getsockname()[1]}"

        class Far(JoinPoint):
            def __init__(self, *arguments, **settings):
                super().__init__(*arguments, **settings)
                self.address = elsewhere

        yield Far, elsewhere
