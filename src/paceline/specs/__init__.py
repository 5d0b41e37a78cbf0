"""Text to dataclass and back, and to a function in a file; limits of numbers, each with its reason; a run's targets."""
