"""What a server does with a gradient where it does not use the workers' optimizer; parameters without one stay as they are."""

import numpy as np

from oracles.problem import SIZE, elements_with


class Rule:
    """Changes the elements of x that have a gradient, by `change(g, of)`; a subclass keeps its state in vectors (SIZE,)."""

    def __init__(self, rate):
        self.rate = rate

    def step(self, x, g, has, factor=1):
        """The parameters after an update, whose rate has a factor."""
        x, of = x.copy(), elements_with(has)
        x[of] -= factor * self.rate * self.change(g[of], of)
        return x

    def change(self, g, of):
        """SGD's."""
        return g


class AdaGrad(Rule):
    """g / (sqrt(initial + sum of g^2) + eps): Downpour's with 0; AsyncAda-GD has 1, and no eps."""

    def __init__(self, rate, *, initial=0.0, eps=1e-10):
        super().__init__(rate)
        self.z, self.eps = np.full(SIZE, initial), eps

    def change(self, g, of):
        self.z[of] += g**2
        return g / (np.sqrt(self.z[of]) + self.eps)


class DualAveraging(Rule):
    """AsyncAda-DA: x = x_0 - rate (sum of g) / sqrt(1 + sum of g^2)."""

    def __init__(self, rate):
        super().__init__(rate)
        self.sum, self.z = np.zeros(SIZE), np.ones(SIZE)

    def change(self, g, of):
        before = self.sum[of] / np.sqrt(self.z[of])
        self.sum[of] += g
        self.z[of] += g**2
        return self.sum[of] / np.sqrt(self.z[of]) - before


class Momentum(Rule):
    """m = beta m + g, in its direction, or Nesterov's g + beta m."""

    def __init__(self, rate, *, beta=0.9, nesterov=False):
        super().__init__(rate)
        self.m, self.beta, self.nesterov = np.zeros(SIZE), beta, nesterov

    def change(self, g, of):
        self.m[of] = self.beta * self.m[of] + g
        return g + self.beta * self.m[of] if self.nesterov else self.m[of]


class RMSProp(Rule):
    """m = beta m + g / (sqrt(v) + eps) with v, the moving mean of g^2."""

    def __init__(self, rate, *, alpha=0.99, eps=1e-8, beta=0.0):
        super().__init__(rate)
        self.m, self.v, self.alpha, self.eps, self.beta = np.zeros(SIZE), np.zeros(SIZE), alpha, eps, beta

    def change(self, g, of):
        self.v[of] = self.alpha * self.v[of] + (1 - self.alpha) * g**2
        self.m[of] = self.beta * self.m[of] + g / (np.sqrt(self.v[of]) + self.eps)
        return self.m[of]


class Adam(Rule):
    """Kingma and Ba's, t counted over all updates."""

    def __init__(self, rate, *, beta1=0.9, beta2=0.999, eps=1e-8):
        super().__init__(rate)
        self.m, self.v, self.t = np.zeros(SIZE), np.zeros(SIZE), 0
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def change(self, g, of):
        self.t += 1
        self.m[of] = self.beta1 * self.m[of] + (1 - self.beta1) * g
        self.v[of] = self.beta2 * self.v[of] + (1 - self.beta2) * g**2
        m, v = self.m[of] / (1 - self.beta1**self.t), self.v[of] / (1 - self.beta2**self.t)
        return m / (np.sqrt(v) + self.eps)
