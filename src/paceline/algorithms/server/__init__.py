"""The parameter server's rules: how a gradient is applied, coded, delayed, averaged, and how many may be late.

Each is pure: frozen data, and small objects that keep tensors. None uses messages, clocks or threads.
"""
