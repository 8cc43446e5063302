"""Compares two versions of this repository on one device, row by row of the performance tables.

  python -m benchmarks.two_trees ../before --minutes 5 --out bench

Each version runs in its own process, from its own folder with its own CUDA library. The processes
take turns, so that both run at the same clock and temperature. They share XLA's autotuning cache,
so that both get the same kernel for the same fusion. A row is slower or faster if the medians
differ by more than 1% and by more than the spread between turns of either version.

Every row is written to two_trees.jsonl as soon as it is measured.
"""

import argparse
import collections
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# An earlier version may lack benchmarks.turns; its process finds this folder's copy on its path.
turns: Any = importlib.import_module(
    "benchmarks.turns" if find_spec("benchmarks.turns") else "turns"
)

HERE = Path(__file__).resolve()
NAMES = ("before", "after")

# Fraction of a GPU's memory that each of the two processes takes.
MEMORY = 0.45

# Largest relative difference at which a row counts as the same.
TOLERANCE = 0.01

# Bytes that evict an operand from every cache when they are accessed: twice the L2 cache of a B200.
OUT_OF_CACHE = 2 * 126 * 2**20


@dataclasses.dataclass(frozen=True)
class Row:
    """A computation that is measured in both versions.

    Attributes:
      what: "patches"; "images", which a backend may cut itself; "patchify" for images that XLA
        cuts; "encoder" for a whole encoder from images.
      backend: name of the backend.
      dtype: dtype of patches and weight.
      shape, images, pixels: the problem, as in `contenders.Case`.
    """

    what: str
    backend: str
    dtype: str
    shape: str
    images: int
    pixels: str = "random"

    def __str__(self) -> str:
        pixels = "images" if self.pixels == "random" else self.pixels
        return f"{self.backend}, {self.dtype}, {self.what}: {self.images} {pixels}, {self.shape}"


# The following functions and class run in the process of a version. Its PYTHONPATH begins with the
# version's folder, which contains its package and its benchmarks.


@functools.cache
def images_of(shape: str, images: int, pixels: str) -> Any:
    from benchmarks.contenders import draw_images
    from pallas_patch_embed.base.problem import named_shape

    return draw_images(named_shape(shape), images, pixels)


@functools.cache
def encoder_of(shape: str, dtype: str) -> Any:
    import jax

    from benchmarks import encoder

    return jax.device_put(encoder.draw(shape, dtype, "bfloat16")[0])


@functools.cache
def params_of(shape: str, dtype: str) -> Any:
    import jax
    import numpy as np

    import pallas_patch_embed as ppe
    from pallas_patch_embed.base.problem import named_shape
    from pallas_patch_embed.commands.demo import draw_weights

    own = named_shape(shape)
    drawn = draw_weights(np.random.default_rng(0), own)
    packed = ppe.pack(**drawn, patch_size=own.patch, grid=own.grid, dtype=dtype)
    return jax.device_put(packed)


@functools.cache
def patches_of(shape: str, images: int, pixels: str, dtype: str) -> Any:
    import jax

    import pallas_patch_embed as ppe

    params = params_of(shape, dtype)
    return jax.jit(ppe.patchify)(images_of(shape, images, pixels), params)


class Version:
    """One of the two versions, which compiles and measures rows in its own process."""

    def __init__(self):
        self.programs: dict[Row, tuple[Any, tuple[Any, ...]]] = {}

    def operands(self, row: Row) -> tuple[Any, ...]:
        """Returns the operands of a row; rows with the same operands share memory."""
        problem = (row.shape, row.images, row.pixels)
        if row.what == "encoder":
            return images_of(*problem), encoder_of(row.shape, row.dtype)
        params = params_of(row.shape, row.dtype)
        if row.what == "patches":
            return patches_of(*problem, row.dtype), params
        return images_of(*problem), params

    def prepare(self, rows: list[dict[str, Any]]) -> dict[str, str]:
        """Compiles rows in parallel; returns the rows that failed, with the reason."""
        import jax

        import pallas_patch_embed as ppe
        from pallas_patch_embed.encoders.encoder import transform

        def encoded(images, encoder, *, backend):
            embedded = ppe.embed_images(images, encoder.patch_embed, backend=backend)
            return transform(encoder, embedded).pooler_output

        def behind_patchify(images, params, *, backend):
            return ppe.patch_embed(ppe.patchify(images, params), params, backend=backend)

        functions = {
            "patches": ppe.patch_embed,
            "images": ppe.embed_images,
            "patchify": behind_patchify,
            "encoder": encoded,
        }
        left_out = {}
        every = [Row(**row) for row in rows]

        def compile_row(row):
            try:
                operands = self.operands(row)
                function = jax.jit(functools.partial(functions[row.what], backend=row.backend))
                self.programs[row] = function.lower(*operands).compile(), operands
            except Exception as reason:
                left_out[str(row)] = turns.first_line(reason)

        # The operands are made before the threads start, so that each is made once.
        for row in every:
            self.operands(row)
        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_row, every))
        return left_out

    def bits(self, row: dict[str, Any]) -> int:
        """Computes a checksum that depends on every bit of a row's result."""
        import jax
        import jax.numpy as jnp

        @jax.jit
        def number(y):
            bits = jax.lax.bitcast_convert_type(y, f"uint{8 * y.dtype.itemsize}").reshape(-1)
            factor = 2 * jax.lax.iota(jnp.uint32, y.size) + 1
            return (bits.astype(jnp.uint32) * factor * factor).sum(dtype=jnp.uint32)

        compiled, operands = self.programs[Row(**row)]
        return int(number(compiled(*operands)))

    def turn(self, row: dict[str, Any], regime: str, rest: float, seconds: float) -> float:
        """Measures the median milliseconds of a call in one turn of one of `results.REGIMES`."""
        import jax

        # The module has moved between versions; benchmarks.contenders imports it in all of them.
        from benchmarks.contenders import timing

        compiled, operands = self.programs[Row(**row)]
        copies = 0
        if regime == "cold":
            # Only operands are copied: each call already writes its result to new memory.
            copies = math.ceil(OUT_OF_CACHE / sum(x.nbytes for x in jax.tree.leaves(operands)))
        further = tuple(jax.tree.map(lambda x: x.copy(), operands) for _ in range(copies))
        compared = {"": timing.Contender(compiled, operands, further)}
        if regime == "sustained":
            calls = 3 if row["what"] == "encoder" else 20
            times = timing.sustained(compared, seconds=seconds, rounds=1, calls=calls)
        elif regime == "call":
            times = timing.latency(compared, rounds=50)
        else:
            times = timing.burst(compared, rounds=1, calls=5, rest=rest)
        return times[""].milliseconds


def process_of(name: str, tree: Path, cache: Path) -> Any:
    """Starts the process of a version."""
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    folders = [str(tree), *inherited, str(HERE.parent)]
    flag = f"--xla_gpu_per_fusion_autotune_cache_dir={cache}"
    environment = {
        "PYTHONPATH": os.pathsep.join(folders),
        "XLA_CLIENT_MEM_FRACTION": str(MEMORY),
        # JAX refuses to start if the deprecated variable has a value, too.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip(),
    }
    # Without -P, Python would search this folder for modules before PYTHONPATH.
    return turns.Process(name, [sys.executable, "-P", str(HERE), "--serve"], environment, tree)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The measurements of a row in a regime, in both versions.

    Attributes:
      row, regime: row and regime that were measured.
      turns: for each version, the median milliseconds of a call in every turn.
      same_bits: whether the results are equal, bit by bit.
    """

    row: Row
    regime: str
    turns: dict[str, list[float]]
    same_bits: bool

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(turns) for name, turns in self.turns.items()}

    @property
    def ratio(self) -> float:
        """Returns the later version's time divided by the earlier version's."""
        return self.medians["after"] / self.medians["before"]

    @property
    def spread(self) -> float:
        """Returns the larger of the versions' spreads between turns, relative to the median."""
        return max((max(t) - min(t)) / self.medians[name] for name, t in self.turns.items())

    @property
    def verdict(self) -> str:
        if abs(self.ratio - 1) <= max(TOLERANCE, self.spread):
            return "same"
        return "slower" if self.ratio > 1 else "faster"

    def record(self) -> dict[str, Any]:
        derived = ("medians", "ratio", "spread", "verdict")
        fields = dataclasses.asdict(self.row) | {"regime": self.regime, "turns": self.turns}
        fields |= {"same_bits": self.same_bits} | {name: getattr(self, name) for name in derived}
        return {"kind": "two trees"} | fields

    def __str__(self) -> str:
        before, after = (self.medians[name] for name in NAMES)
        bits = "" if self.same_bits else ", other bits"
        return (
            f"{f'{self.row}, {self.regime}':75}{before:10.4f}{after:10.4f}{self.ratio:8.3f}"
            f"{self.spread:7.1%}  {self.verdict}{bits}"
        )


def compare(
    trees: tuple[Path, Path],
    plan: list[tuple[Row, str]],
    *,
    minutes: float = math.inf,
    rounds: int = 3,
    rest: float = 0.3,
    seconds: float = 1.0,
) -> Iterator[Comparison | str]:
    """Measures rows in both versions, which take turns.

    Args:
      trees: the folders of the versions, before and after.
      plan: rows and regimes, in the order in which they are measured.
      minutes: no measurement begins after this time.
      rounds: number of turns of each version.
      rest: idle seconds before a burst.
      seconds: duration of a sustained turn.

    Yields:
      Comparisons, and a message for everything that was left out.
    """
    begin = time.monotonic()
    rows = list(dict.fromkeys(row for row, _ in plan))
    with tempfile.TemporaryDirectory() as cache:
        versions = [process_of(*which, Path(cache)) for which in zip(NAMES, trees)]
        try:
            left_out = {}
            # The versions compile one after the other, so that the second one finds the results of
            # XLA's autotuning for the first one.
            for version in versions:
                left_out |= version.call("prepare", rows=rows)
                yield f"{version.name}: compiled after {time.monotonic() - begin:.0f} s"
            yield from (f"without {row}: {reason}" for row, reason in left_out.items())
            bits: dict[Row, bool] = {}
            for row, regime in plan:
                if str(row) in left_out:
                    continue
                if time.monotonic() - begin > 60 * minutes:
                    yield f"skipped, out of time: {row}, {regime}"
                    continue
                try:
                    if row not in bits:
                        one, other = (version.call("bits", row=row) for version in versions)
                        bits[row] = one == other
                    found = collections.defaultdict(list)
                    for i in range(rounds):
                        for version in versions if i % 2 == 0 else versions[::-1]:
                            ms = version.call(
                                "turn", row=row, regime=regime, rest=rest, seconds=seconds
                            )
                            found[version.name].append(ms)
                except RuntimeError as reason:
                    if any(version.ended for version in versions):
                        raise
                    yield f"without {row}, {regime}: {reason}"
                    continue
                yield Comparison(row, regime, dict(found), bits[row])
        finally:
            for version in versions:
                version.end()


DTYPES = ("float8_e4m3fn", "int8", "bfloat16")


def plan(images: int, few: list[int], encoders: dict[str, int]) -> list[tuple[Row, str]]:
    """Lists the rows of docs/performance.md that this package computes, the most important first.

    XLA's int8 product is left out, because XLA autotunes it for minutes.
    """
    shape = "B/16 224"
    rows = [
        Row(what, backend, dtype, shape, images)
        for what, backends in (
            ("patches", ("cuda", "mosaic_sm90", "triton", "xla")),
            ("images", ("cuda", "mosaic_sm90", "triton", "xla")),
            ("patchify", ("triton",)),
        )
        for backend, dtype in itertools.product(backends, DTYPES)
        if (backend, dtype) != ("xla", "int8")
    ]
    found = [(row, "burst") for row in rows]
    for n, backend in itertools.product(few, ("cuda", "mosaic_sm90")):
        row = Row("patches", backend, "float8_e4m3fn", shape, n)
        found += [(row, regime) for regime in ("burst", "cold", "call")]
    for name, n in encoders.items():
        own = [Row("encoder", "cuda", dtype, name, n) for dtype in DTYPES]
        found += [(row, regime) for row in own for regime in ("burst", "sustained")]
    own_kernels = [row for row in rows if row.backend in ("cuda", "mosaic_sm90")]
    found += [(row, "sustained") for row in own_kernels]
    photographs = [dataclasses.replace(row, pixels="photographs") for row in own_kernels]
    return found + [(row, "burst") for row in photographs]


def recorded(path: Path) -> set[tuple[Row, str]]:
    """Returns the rows and regimes that an earlier two_trees.jsonl contains."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    names = [field.name for field in dataclasses.fields(Row)]
    return {
        (Row(**{name: record[name] for name in names}), record["regime"])
        for record in records
        if record["kind"] == "two trees"
    }


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_trees",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "before", type=Path, help="folder of the earlier version, with its CUDA library built"
    )
    parser.add_argument(
        "--after",
        type=Path,
        default=HERE.parents[1],
        help="folder of the later version; default: this one",
    )
    parser.add_argument("--images", type=int, default=4736, help="images per call of most rows")
    parser.add_argument(
        "--few", type=int, nargs="*", default=[1, 64], help="images per call of the other rows"
    )
    parser.add_argument(
        "--measured", type=Path, help="an earlier two_trees.jsonl; its rows are not measured again"
    )
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of each version")
    parser.add_argument("--rest", type=float, default=0.3, help="idle seconds before each burst")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a sustained turn")
    parser.add_argument("--out", type=Path, help="folder for two_trees.jsonl")
    chosen = parser.parse_args()
    for tree in (chosen.before, chosen.after):
        if not (tree / "pallas_patch_embed" / "__init__.py").exists():
            parser.error(f"{tree} does not contain pallas_patch_embed")
    return chosen


def main() -> None:
    """Prints and records every comparison."""
    if sys.argv[1:] == ["--serve"]:
        turns.serve(Version())
        return
    chosen = arguments()
    rows = plan(chosen.images, chosen.few, {"B/16 224": 512, "So400m/14 384": 64})
    if chosen.measured:
        done = recorded(chosen.measured)
        rows = [row for row in rows if row not in done]
    path = chosen.out and chosen.out / "two_trees.jsonl"
    if path:
        chosen.out.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    trees = (chosen.before.resolve(), chosen.after.resolve())
    options = {name: getattr(chosen, name) for name in ("minutes", "rounds", "rest", "seconds")}
    print(f"{'':75}{'before':>10}{'after':>10}{'ratio':>8}{'spread':>7}", flush=True)
    verdicts: collections.Counter[str] = collections.Counter()
    for found in compare(trees, rows, **options):
        print(found, flush=True)
        told = isinstance(found, str)
        if not told:
            verdicts[found.verdict] += 1
        if path:
            record = {"kind": "note", "text": found} if told else found.record()
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
    print(", ".join(f"{verdict}: {number}" for verdict, number in verdicts.items()))


if __name__ == "__main__":
    main()
