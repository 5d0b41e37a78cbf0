"""The user's optimizer: as data, on a flat vector, on a part of it, and several as one."""
