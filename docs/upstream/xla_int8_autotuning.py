"""Shows that XLA's int8 matrix product without autotuning is wrong on a Hopper GPU.

Needs jax and an NVIDIA GPU. docs/upstream.md explains the fault.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np


def main() -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-128, 128, shape, np.int8) for shape in ((64, 3072), (3072, 768)))
    expected = a.astype(np.int32) @ b.astype(np.int32)
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.int32))
    wrong = (np.asarray(product(a, b)) != expected).mean()
    print(f"jax {jax.__version__}, {jax.devices()[0]}: {wrong:.1%} of the elements are wrong")


if __name__ == "__main__":
    main()
