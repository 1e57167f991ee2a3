"""Which expert lives where, and how the experts of a tier are reached.

Knows: tables of places, statistics of routes, and how a function is cut where a second device computes for it. Does not
know: the model that reads them.
"""
