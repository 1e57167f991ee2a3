"""Products of 8 rows with the weights every token reads: FP8 projections, and BF16 ones that see exact inputs.

`reference` is the meaning in plain jax.numpy, `fused` the same functions as Triton launches. Several matrices
that share an input are one packed matrix (`packing`). Results are partial sums over the columns [S, R, N], which the
consumer adds in order.
"""
