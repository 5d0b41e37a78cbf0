"""The user's optimizer as data, on a flat vector, on a part of it, several as one; and the flat vector itself."""
