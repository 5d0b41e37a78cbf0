"""A model in parts: its layers, for the balance equations."""
