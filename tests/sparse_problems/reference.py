"""SGD on a dense matrix in plain NumPy, one line per line of the mathematics: what the kernels must equal on one thread."""

import math

import numpy as np

from paceline.sparse.steps import CONSTANT, INVSCALING

VALUES = {
    "log_loss": lambda p, y, e: math.log1p(math.exp(-p * y)),
    "hinge": lambda p, y, e: max(0, 1 - p * y),
    "squared_hinge": lambda p, y, e: max(0, 1 - p * y) ** 2,
    "squared_error": lambda p, y, e: (p - y) ** 2 / 2,
    "huber": lambda p, y, e: (p - y) ** 2 / 2 if abs(p - y) < e else e * abs(p - y) - e * e / 2,
    "modified_huber": lambda p, y, e: max(0, 1 - p * y) ** 2 if p * y > -1 else -4 * p * y,
    "perceptron": lambda p, y, e: max(0, -p * y),
    "epsilon_insensitive": lambda p, y, e: max(0, abs(p - y) - e),
    "squared_epsilon_insensitive": lambda p, y, e: max(0, abs(p - y) - e) ** 2,
}


def slope(loss, p, y, epsilon):
    """By central differences: nothing is shared with the slopes that are written out."""
    h = 1e-6
    return (VALUES[loss](p + h, y, epsilon) - VALUES[loss](p - h, y, epsilon)) / (2 * h)


def learning_rate(plan, step):
    if plan.schedule == CONSTANT:
        return plan.eta
    return plan.eta / (step + 1) ** plan.power if plan.schedule == INVSCALING else plan.eta / (plan.offset + step)


class Account:
    """The cumulative L1 penalty: in units of the weights before all divisions by 1 + eta l2."""

    def __init__(self, width):
        self.scale, self.owed, self.paid = 1.0, 0.0, np.zeros(width)

    def charge(self, w, eta, plan):
        v = w / self.scale
        self.owed += eta * plan.l1 / self.scale
        after = np.where(v > 0, np.maximum(0, v - (self.owed + self.paid)), np.minimum(0, v + (self.owed - self.paid)))
        self.paid += after - v
        self.scale /= 1 + eta * plan.l2
        return after * self.scale


def sgd(X, targets, weights, plan, slope_of, order, *, w, b, squares, account, first_step=0):
    """One output; every weight pays every penalty at every step. Returns w, b, squares."""
    for number, row in enumerate(order):
        x, y = X[row], targets[row]
        eta = learning_rate(plan, first_step + number)
        g = weights[row] * slope_of(x @ w + b, y)
        gradient = g * x
        if plan.adagrad:
            squares = squares + gradient**2
            w = w - eta * gradient / np.sqrt(squares)
        else:
            w = w - eta * gradient
        b = b - eta * g * plan.intercept_rate
        w = account.charge(w, eta, plan)
    return w, b, squares
