"""Data and model parallelism at once: convolutions data-parallel, fully connected layers cut over groups of workers."""
