"""Everything a pass writes into the caches of one attention layer, fused into one launch."""
