"""scikit-learn's own checks, all of them."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from paceline.sklearn import HogwildClassifier, HogwildMatrixFactorization, HogwildRegressor

WEIGHTS = (
    "one step of weight 2 is not two steps of weight 1; scikit-learn excepts its own SGD estimators for the same reason"
)
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": WEIGHTS,
    "check_sample_weight_equivalence_on_sparse_data": WEIGHTS,
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(
    [HogwildClassifier(), HogwildRegressor(), HogwildMatrixFactorization()],
    expected_failed_checks=lambda estimator: EXPECTED if hasattr(estimator, "loss") else {},
    xfail_strict=True,
)
def test_check_estimator(estimator, check):
    check(estimator)
