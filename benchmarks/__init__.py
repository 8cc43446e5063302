"""Measurements of the operator, and of what compilers make of it. Not part of the wheel."""
