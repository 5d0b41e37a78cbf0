"""The user's own loop under `attach`: its step (`replica.py`), and guards for what loops do."""
