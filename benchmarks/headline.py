"""The headline problem beside its peers: 4736 images of B/16 at 224, [928256, 768] x [768, 768]^T.

  python -m benchmarks.headline [--dtypes float8_e4m3fn int8 bfloat16] [--images 4736]

Prints burst and sustained times of the fused operator (scale, positions, one rounding), of the bare
matrix product in both layouts of the weight, and of XLA's product with the table behind it, with
the ceilings of the memory, all interleaved in one run.
"""

import argparse

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import timing
from benchmarks.timing import Contender
from pallas_patch_embed.backends import mosaic_sm90, xla
from pallas_patch_embed.problem import named_shape, padded

HEADLINE = named_shape("B/16 224")

# A burst in which cuBLAS's float8 product takes longer says nothing about an H200.
SLOWEST_PEER_MS = 0.88


def draw(dtype: str, images: int) -> tuple[jax.Array, ...]:
    """Random patches [B, S, K], weight [N, K], scale [N] and table [S, N] on the device."""
    S, N, K = HEADLINE.S, HEADLINE.N, padded(HEADLINE.K)
    keys = jax.random.split(jax.random.key(0), 4)

    @jax.jit
    def numbers(key):
        if dtype == "int8":
            return lax.bitcast_convert_type(jax.random.bits(key, (S, K), jnp.uint8), jnp.int8)
        return jax.random.uniform(key, (S, K), jnp.float32, -1, 1).astype(dtype)

    # One image at a time, so that there is no float32 copy of all patches.
    patches = jax.jit(lambda keys: lax.map(numbers, keys))(jax.random.split(keys[0], images))
    weight = jax.random.normal(keys[1], (N, K))
    weight = (32 * weight).round().clip(-127, 127) if dtype == "int8" else weight
    scale = jnp.exp(jax.random.normal(keys[2], (N,)))
    return patches, weight.astype(dtype), scale, jax.random.normal(keys[3], (S, N), jnp.bfloat16)


def product(patches: jax.Array, weight: jax.Array, *, axis: int) -> jax.Array:
    """The bare product, to bfloat16 (int32 for int8), without scale and table."""
    out = jnp.int32 if patches.dtype == jnp.int8 else jnp.bfloat16
    dimensions = (((2,), (axis,)), ((), ()))
    return lax.dot_general(patches, weight, dimensions, preferred_element_type=out)


def without_barrier(patches, weight, scale, table):
    """XLA's product, scale and table, fused as XLA likes."""
    out = jnp.int32 if patches.dtype == jnp.int8 else jnp.float32
    accumulator = lax.dot_general(
        patches, weight, (((2,), (1,)), ((), ())), preferred_element_type=out
    )
    return (accumulator.astype(jnp.float32) * scale + table).astype(jnp.bfloat16)


def contenders(dtypes: list[str], images: int) -> dict[str, Contender]:
    """Everything that is compared, by name."""
    found = {}
    for dtype in dtypes:
        operands = draw(dtype, images)
        patches, weight = operands[:2]
        fused = jax.jit(lambda *x: mosaic_sm90.run(*x, out_dtype="bfloat16"))
        definition = jax.jit(lambda *x: xla.run(*x, out_dtype="bfloat16"))
        y, wanted = fused(*operands), definition(*operands)
        error = jnp.abs(y.astype(jnp.float32) - wanted.astype(jnp.float32))
        print(f"{dtype}: largest difference of mosaic_sm90 and xla {error.max()}", flush=True)
        del y, wanted, error
        forms = {
            "mosaic_sm90, fused": (fused, operands),
            "bare product, [N, K]": (
                jax.jit(lambda a, w: product(a, w, axis=1)),
                (patches, weight),
            ),
            "bare product, [K, N]": (
                jax.jit(lambda a, w: product(a, w, axis=0)),
                (patches, jnp.asarray(weight.T)),
            ),
            "xla, fused": (definition, operands),
            "xla, fused, no barrier": (jax.jit(without_barrier), operands),
        }
        for name, (function, arguments) in forms.items():
            found[f"{dtype} {name}"] = Contender(function, arguments)
    return found


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float8_e4m3fn", "int8", "bfloat16"])
    parser.add_argument("--images", type=int, default=4736)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5, help="of a sustained turn")
    chosen = parser.parse_args()
    print(timing.versions())
    compared = contenders(chosen.dtypes, chosen.images)
    limits = timing.ceilings(0.7)
    bursts = timing.burst(
        compared | {name: contender for name, (contender, _) in limits.items()},
        rounds=chosen.rounds,
    )
    lasting = {n: c for n, c in compared.items() if "mosaic" in n or "bare product" in n}
    sustained = timing.sustained(lasting, seconds=chosen.seconds)
    for title, found in (("burst", bursts), ("sustained", sustained)):
        print(f"\n{title}, {chosen.images} images")
        peers = {
            dtype: min(t.milliseconds for n, t in found.items() if n.startswith(f"{dtype} bare"))
            for dtype in chosen.dtypes
        }
        if title == "burst" and peers.get("float8_e4m3fn", 0) > SLOWEST_PEER_MS:
            print(
                f"The float8 product needs more than {SLOWEST_PEER_MS} ms: this run does not count."
            )
        fastest = peers.get("float8_e4m3fn", min(peers.values()))
        for name, found_time in found.items():
            dtype = name.split()[0]
            text = f"{name:40} {found_time}"
            if name in limits:
                text += f"  {limits[name][1] / found_time.milliseconds / 1e9:.2f} TB/s"
            else:
                text += f"  {found_time.milliseconds / peers[dtype]:.3f} of its bare product"
                text += f"  {found_time.milliseconds / fastest:.3f} of float8's"
            print(text)


if __name__ == "__main__":
    main()
