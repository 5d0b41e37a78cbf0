"""Which algorithm, and how many workers: short runs here, models and simulations of the rest, and a ranked answer.

It sits on top of everything that trains or simulates.
"""
