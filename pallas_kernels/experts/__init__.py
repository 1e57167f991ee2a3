"""Mixture-of-experts products of a decode step: gate and up, then down, over the experts its rows chose.

`reference` is the meaning in plain jax.numpy, `fused` the same functions as Triton launches, both on the packed
weights of `packing`.
"""
