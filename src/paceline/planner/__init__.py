"""Models that say, from few measurements, how long training will take: of a step, of the convergence, of both together.

`system_model` is Ernest, `convergence_model` and `time_to_loss` are Hemingway, `noise_scale` the critical batch size, and
`balance` Das et al.'s balance equations. They are arithmetic on figures: they know no algorithm, task or run.
"""
