"""The output head: logits of 8 rows over the vocabulary and each row's best token.

`reference` is the meaning in plain jax.numpy, `fused` the same function as two Triton launches, which a step uses.
`mosaic` is its large launch once more as a Pallas Mosaic kernel, for Hopper alone.
"""
