"""The model that composition tests train, in NumPy: its loss, its gradient, its optimizers. In float64, without PyTorch."""

import numpy as np

INPUTS, OUTPUTS, SAMPLES = 6, 5, 144

#: Name and shape of each trained parameter, in the model's order.
SHAPES = {"weight": (OUTPUTS, INPUTS), "bias": (OUTPUTS,), "branch": (2, INPUTS)}
_SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
_ENDS = np.cumsum(_SIZES)
PARTS = [slice(end - size, end) for end, size in zip(_ENDS, _SIZES, strict=True)]
SIZE = int(_ENDS[-1])

_random = np.random.default_rng(7)
X = _random.normal(size=(SAMPLES, INPUTS))
Y = X @ _random.normal(size=(INPUTS, OUTPUTS)) + 0.1 * _random.normal(size=(SAMPLES, OUTPUTS))
START = _random.normal(size=SIZE)
FROZEN = _random.normal(size=OUTPUTS)  # a parameter that is not trained


def uses_branch(samples):
    """A batch reaches the branch if its first sample is even: otherwise the branch has no gradient."""
    return samples[0] % 2 == 0


def rows_of(samples):
    """Which rows of the branch a batch uses that reaches it: one or both."""
    return [0, 1] if samples[0] % 4 == 0 else [0]


def elements_with(has):
    """Which elements (SIZE,) are of parameters that have a gradient."""
    return np.repeat(has, _SIZES)


def gradient(x, samples):
    """The gradient (SIZE,) of the mean loss of these samples at x, and which parameters have one (3,).

    The loss of a sample is |W s + b + frozen - y|^2 / 2, and |V s|^2 / 2 more if the batch uses these rows V of the branch.
    """
    W, b, V = (x[part].reshape(shape) for part, shape in zip(PARTS, SHAPES.values(), strict=True))
    s, y, n = X[samples], Y[samples], len(samples)
    error = (s @ W.T + b + FROZEN - y) / n
    branch, rows = np.zeros_like(V), rows_of(samples)
    if uses_branch(samples):
        branch[rows] = (s @ V[rows].T).T @ s / n
    g = np.concatenate([(error.T @ s).ravel(), error.sum(0), branch.ravel()])
    return g, np.array([True, True, uses_branch(samples)])


class Optimizer:
    """torch.optim's SGD, AdamW or Adagrad on a vector (SIZE,); parameters without a gradient make no step.

    Args:
        kind: "sgd", "momentum", "nesterov", "adamw" or "adagrad".
        rate: the learning rate.
    """

    def __init__(self, kind, rate):
        self.kind, self.rate = kind, rate
        self.m, self.v = np.zeros(SIZE), np.zeros(SIZE)
        self.steps = np.zeros(len(PARTS), dtype=int)

    def step(self, x, g, has, factor=1):
        """The parameters after a step with the gradient g; `has`: which have one; `factor`: on the learning rate."""
        x = x.copy()
        for number, part in enumerate(PARTS):
            if has[number]:
                self.steps[number] += 1
                x[part] -= factor * self._change(x[part], g[part], part, self.steps[number])
        return x

    def _change(self, x, g, part, t):
        if self.kind == "sgd":
            return self.rate * g
        if self.kind in ("momentum", "nesterov"):
            self.m[part] = 0.9 * self.m[part] + g
            return self.rate * (g + 0.9 * self.m[part] if self.kind == "nesterov" else self.m[part])
        if self.kind == "adagrad":
            self.v[part] += g**2
            return self.rate * g / (np.sqrt(self.v[part]) + 1e-10)
        self.m[part] = 0.9 * self.m[part] + 0.1 * g
        self.v[part] = 0.999 * self.v[part] + 0.001 * g**2
        m, v = self.m[part] / (1 - 0.9**t), self.v[part] / (1 - 0.999**t)
        return self.rate * (m / (np.sqrt(v) + 1e-8) + 0.01 * x)


def clipped(g, norm):
    """As torch.nn.utils.clip_grad_norm_; None: not at all."""
    return g if norm is None else g * min(1.0, norm / (np.linalg.norm(g) + 1e-6))
