"""The grouped low-rank output projection of attention, two matrices in one launch."""
