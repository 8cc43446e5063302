"""`pallas-patch-embed check`: whether every backend that serves here computes the operator."""
