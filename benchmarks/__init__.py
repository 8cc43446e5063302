"""Measurements of the operator and of its compiled kernels. Not part of the wheel."""
