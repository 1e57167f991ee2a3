"""Speculative decoding: sampling laws, randomness, accept rules, and the step that joins them to a model."""
