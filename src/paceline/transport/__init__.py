"""The ports that algorithms are written against."""
