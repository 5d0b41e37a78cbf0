"""Starts workers and servers, sees deaths, replaces, takes checkpoints, ends runs."""
