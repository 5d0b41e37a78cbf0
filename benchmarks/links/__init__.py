"""Four workers whose links are slow: the networks, what each system runs in them, and what came of it."""
