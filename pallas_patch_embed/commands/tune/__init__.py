"""The command `pallas-patch-embed tune`, which searches for the fastest config of each backend."""
