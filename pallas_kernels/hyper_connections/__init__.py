"""Hyper-connections between two sublayers, fused: spread, mix, collapse, norm and rounding in one launch."""
