"""The router of a mixture of experts, fused: scores, choice and the list of distinct experts in one launch."""
