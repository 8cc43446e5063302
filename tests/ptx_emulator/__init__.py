"""Executes PTX on a CPU, bit for bit, and reports races, hangs and accesses out of bounds."""
