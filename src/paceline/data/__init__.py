"""Who trains on which samples, and how a worker fetches them."""
