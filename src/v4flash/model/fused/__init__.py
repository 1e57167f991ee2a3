"""The model on packed weights, its operations fused by hand.

`model.py` offers what `backbone.py` and `drafter.py` beside this folder offer, on weights that were repacked once, by
the operations of `pallas_kernels`: as fused launches, or by their definitions.
"""
