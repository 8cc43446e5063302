"""Executes PTX on a CPU, bit for bit, and reports races, deadlocks and accesses out of bounds."""
