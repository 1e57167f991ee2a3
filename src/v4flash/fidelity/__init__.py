"""Evidence that the model computes what others compute: logits and drafts as files that anyone can compare.

Knows: how a list of token ids becomes arrays on disk. Does not know: command lines, or text.
"""
