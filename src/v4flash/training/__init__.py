"""What makes the demonstration models: corpus, data, losses and loops. Knows model and speculative; nothing
imports it.
"""
