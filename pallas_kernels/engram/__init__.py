"""The n-gram memory of V4.1, fused around its one large product: lookup in front of it, gated update behind it."""
