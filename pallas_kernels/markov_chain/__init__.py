"""The drafter's serial part, fused: every drafted token biases the logits of the next, in one launch."""
