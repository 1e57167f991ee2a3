"""The boundary in front of attention and the products that read its rows, fused into one launch."""
