"""Timed runs and their records: what was run, where, how long it took, and the least it could have taken."""
