"""Products of 8 rows with the weights every token reads: FP8 projections, and BF16 ones that see exact inputs.

`reference` is the meaning in plain jax.numpy, `fused` the same functions as Triton launches. Several matrices
that share an input are one packed matrix (`packing`), or two, an FP8 and a BF16 one, in one launch. Results are
partial sums over the columns [S, R, N], which the consumer adds in order.
"""
