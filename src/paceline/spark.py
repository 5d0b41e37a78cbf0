"""Training in Spark's tasks, on the partitions of a DataFrame; needs the extra `paceline[spark]`.

>>> import paceline as pl
>>> pl.spark.DeepDist.__name__
'DeepDist'
"""

from paceline.integrations.spark import DeepDist, Trained
from paceline.integrations.spark_launch import SparkRun, launch
from paceline.integrations.spark_rows import Rows

__all__ = ["DeepDist", "Rows", "SparkRun", "Trained", "launch"]
