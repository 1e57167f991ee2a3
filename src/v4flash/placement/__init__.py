"""Which expert lives where, and how the experts of a tier are reached.

Knows: tables of places, and statistics of routes. Does not know: the model that reads them.
"""
