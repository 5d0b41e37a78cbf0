"""Models that predict from a few measurements how long training will take: step time, convergence, and both together.

`system_model` is Ernest, `convergence_model` and `time_to_loss` are Hemingway, and `balance` Das et al.'s balance
equations. They are arithmetic on numbers, independent of algorithms, tasks and runs.
"""
