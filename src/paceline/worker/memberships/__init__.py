"""A worker's part in a run: one protocol, and one implementation for each way in which a run is started."""
