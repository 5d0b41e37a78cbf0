"""A model's parameters as one vector, and sums over vectors of half-precision types."""
