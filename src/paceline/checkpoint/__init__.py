"""What a checkpoint holds, and its files."""
