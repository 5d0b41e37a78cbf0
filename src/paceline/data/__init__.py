"""Which worker trains on which samples, and how it fetches them."""
