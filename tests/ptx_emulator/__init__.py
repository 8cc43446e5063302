"""Executes PTX on a CPU, bit for bit, and refuses what a GPU would be free to get wrong."""
