"""Sessions of real Spark on this machine, for tests; and the end of the Java process behind them."""

import os
import sys

from pyspark import SparkContext
from pyspark.sql import SparkSession


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
