"""Private parts of scikit-learn and Click that Paceline uses, each in one file; Lightning's are in `tests/integrations`."""

import importlib

import pytest
import sklearn
import typer


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sklearn.linear_model._base", "LinearClassifierMixin"),
        ("sklearn.linear_model._base", "SparseCoefMixin"),
        ("sklearn.utils.validation", "_check_sample_weight"),
    ],
)
def test_scikit_learn_has(module, name):
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.fail(f"scikit-learn {sklearn.__version__} lacks {module}.{name}: see integrations/linear.py")


def test_click_s_base_of_errors_is_typer_s():
    names = [kind.__name__ for kind in typer.BadParameter.__mro__]
    assert "ClickException" in names, (
        f"wrong options end in a traceback, not in a sentence: see cli/app.py, not {names}"
    )
