"""The search for the fastest config of each backend: `pallas-patch-embed tune`."""
