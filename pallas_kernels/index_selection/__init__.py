"""The lightning indexer of a few query rows, fused: index scores in one launch, the exact selection in another."""
