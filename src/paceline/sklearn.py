"""Hogwild! as scikit-learn estimators: change one import, and use all cores.

>>> from paceline.sklearn import HogwildClassifier
>>> HogwildClassifier(max_iter=50, random_state=0).fit([[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1]).predict([[3.0]])
array([1])
"""

from paceline.integrations.factorization import HogwildMatrixFactorization
from paceline.integrations.sklearn import HogwildClassifier, HogwildRegressor

__all__ = ["HogwildClassifier", "HogwildMatrixFactorization", "HogwildRegressor"]
