"""The user's own loop under `attach`: what its habits mean for the run, or why they are refused."""
