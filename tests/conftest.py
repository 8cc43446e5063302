"""Eight virtual CPU devices for the sharding tests, in every worker, before JAX starts."""

import os

FLAG = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
