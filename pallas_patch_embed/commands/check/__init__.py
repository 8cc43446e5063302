"""The command `pallas-patch-embed check`, which compares every backend with a reference."""
