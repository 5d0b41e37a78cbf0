"""One step of a worker: gradient, apply, record; shared by both kinds of loop."""
