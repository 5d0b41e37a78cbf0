"""What a run's workers write down of every step, and what it comes to."""
