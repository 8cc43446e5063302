"""The operator beside its peers, by default on the headline problem: 4736 images of B/16 at 224.

  python -m benchmarks.headline [--shape "B/16 224"] [--images 4736] [--dtypes int8 bfloat16]

Prints burst and sustained times of the fused operator (scale, positions, one rounding), of the bare
matrix product in both layouts of the weight, and of XLA's product with the table behind it, with
the ceilings of the memory, all interleaved in one run; for up to 64 images also the wall time of
one call.
"""

import argparse

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import timing
from benchmarks.timing import Contender, Timing
from pallas_patch_embed.backends import mosaic_sm90, xla
from pallas_patch_embed.problem import NAMED_SHAPES, NamedShape, named_shape, padded

# A burst of the headline problem in which cuBLAS's float8 product takes longer says nothing about
# an H200.
HEADLINE = ("B/16 224", 4736)
SLOWEST_PEER_MS = 0.88

# Up to so many images the time of one call counts, beyond it that of a pipeline.
LATENCY_IMAGES, SUSTAINED_IMAGES = 64, 1024


def draw(shape: NamedShape, dtype: str, images: int) -> tuple[jax.Array, ...]:
    """Random patches [B, S, K], weight [N, K], scale [N] and table [S, N] on the device."""
    S, N, K = shape.S, shape.N, padded(shape.K)
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


def contenders(shape: NamedShape, dtypes: list[str], images: int) -> dict[str, Contender]:
    """Everything that is compared, by name."""
    found = {}
    for dtype in dtypes:
        operands = draw(shape, dtype, images)
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
        }
        for name, (function, arguments) in forms.items():
            found[f"{dtype} {name}"] = Contender(function, arguments)
    return found


def fastest_product(found: dict[str, Timing], dtype: str) -> str:
    """The name of the fastest bare product of this dtype."""
    names = [name for name in found if name.startswith(f"{dtype} bare")]
    return min(names, key=lambda name: found[name].milliseconds)


def show(title: str, found: dict[str, Timing], dtypes: list[str], moved: dict[str, int]) -> None:
    """Prints one table: times, and their ratios to the bare products."""
    print(f"\n{title}", flush=True)
    peers = {dtype: found[fastest_product(found, dtype)].milliseconds for dtype in dtypes}
    float8 = peers.get("float8_e4m3fn")
    for name, timing_found in found.items():
        text, ms = f"{name:40} {timing_found}", timing_found.milliseconds
        if name in moved:
            text += f"  {moved[name] / ms / 1e9:.2f} TB/s"
        else:
            text += f"  {ms / peers[name.split()[0]]:.3f} of its bare product"
            text += f"  {ms / float8:.3f} of float8's" if float8 else ""
        print(text)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [shape.name for shape in NAMED_SHAPES]
    parser.add_argument("--shape", choices=names, default=HEADLINE[0], metavar="NAME")
    parser.add_argument("--images", type=int, nargs="+", default=[HEADLINE[1]])
    parser.add_argument("--dtypes", nargs="+", default=["float8_e4m3fn", "int8", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5, help="of a sustained turn")
    chosen = parser.parse_args()
    print(timing.versions())
    limits = timing.ceilings(0.7)
    moved = {name: moved for name, (_, moved) in limits.items()}
    for images in chosen.images:
        compared = contenders(named_shape(chosen.shape), chosen.dtypes, images)
        title = f"{chosen.shape}, {images} images"
        bursts = timing.burst(
            compared | {name: contender for name, (contender, _) in limits.items()},
            rounds=chosen.rounds,
        )
        show(f"{title}, burst", bursts, chosen.dtypes, moved)
        peer = bursts.get("float8_e4m3fn bare product, [N, K]")
        if (chosen.shape, images) == HEADLINE and peer and peer.milliseconds > SLOWEST_PEER_MS:
            print(f"float8's product needs more than {SLOWEST_PEER_MS} ms: this does not count.")
        if images <= LATENCY_IMAGES:
            show(f"{title}, one call", timing.latency(compared), chosen.dtypes, moved)
        if images >= SUSTAINED_IMAGES:
            peers = {fastest_product(bursts, dtype) for dtype in chosen.dtypes}
            lasting = {n: c for n, c in compared.items() if "mosaic" in n or n in peers}
            found = timing.sustained(lasting, seconds=chosen.seconds)
            show(f"{title}, sustained", found, chosen.dtypes, moved)


if __name__ == "__main__":
    main()
