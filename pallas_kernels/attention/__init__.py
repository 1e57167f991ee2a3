"""Attention of a few query rows over the window ring and one further set of keys, fused into one launch."""
