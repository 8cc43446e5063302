"""The operator itself: its public functions, its parameters and the JAX primitive."""
