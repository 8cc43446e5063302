"""Whole vision encoders: the readers of checkpoints, and the transformer."""
