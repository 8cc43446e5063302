"""The tests run on eight virtual CPU devices, unless JAX_PLATFORMS says otherwise."""

import os

FLAG = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
