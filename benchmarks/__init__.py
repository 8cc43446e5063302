"""Measurements of the operator and of its compiled kernels. The wheel does not contain them."""
