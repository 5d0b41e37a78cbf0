"""What connects workers: the ports that algorithms are written against."""
