"""Training in Spark's tasks, on the partitions of a DataFrame; needs the extra `paceline[spark]`.

>>> import paceline as pl
>>> pl.spark.DeepDist.__name__
'DeepDist'
"""

from paceline.integrations.spark import DeepDist, Trained

__all__ = ["DeepDist", "Trained"]
