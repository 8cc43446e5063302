"""The cases that are checked, in which every two values of two parameters occur together."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pallas_patch_embed.base.dtypes import OUT_DTYPES
from pallas_patch_embed.base.problem import (
    NAMED_SHAPES,
    NamedShape,
    PatchGeometry,
    Problem,
    named_shape,
    padded,
)
from pallas_patch_embed.commands.check.compare import LAUNCHES

# Values of `CheckCase.table`. With "no positions" the table is a single row, the offset.
TABLES = ("positions", "positions of each image", "no positions")
# Values of `CheckCase.source`. If images are "given whole", the kernel or XLA cuts them.
SOURCES = ("given as patches", "given whole", "cut by the kernel")

# Numbers of images. They are odd, so that the last tile is incomplete; 67 images of any shape have
# many tiles.
BATCHES = (1, 3, 67)
# A number of images with which each worker of a large GPU has many tiles.
MANY = 4736

# One shape for each K, N and S that a kernel treats in a different way.
FEW_SHAPES = tuple(
    map(
        named_shape,
        (
            "B/16 224",
            "B/32 256",
            "L/16 384",
            "So400m/14 384",
            "So400m/16 512",
            "g-opt/16 256",
            "NaFlex So400m/16 256",
            "Gemma 3/14 896",
        ),
    )
)
SHAPES = {"few": FEW_SHAPES, "all": NAMED_SHAPES}

# A shape whose weight has a tensor map with a stride smaller than the size of another dimension.
WIDE = NamedShape("wide", 6, 24, 16384)
# A shape with an odd number of patches side by side, whose lines TMA loads one by one.
ODD = NamedShape("odd", 16, 240, 768)
# A shape for interpreters, which take seconds for it.
SMALL = NamedShape("small", 6, 42, 64)


@dataclasses.dataclass(frozen=True)
class CheckCase:
    """A problem of a backend that is launched and compared, once or many times.

    Attributes:
      backend: name of the backend.
      shape: shape of a model.
      dtype: dtype of patches and weight.
      out_dtype: dtype of the result.
      B: number of images.
      table: one of `TABLES`.
      source: one of `SOURCES`.
      launch: one of `compare.LAUNCHES`.
      on_every_device: whether all devices launch at the same time.
    """

    backend: str
    shape: NamedShape
    dtype: str
    out_dtype: str
    B: int
    table: str = "positions"
    source: str = "given as patches"
    launch: str = "alone"
    on_every_device: bool = False

    @property
    def problem(self) -> Problem:
        """Shapes and dtypes of the case."""
        B, S, K, N = self.B, self.shape.S, padded(self.shape.K), self.shape.N
        tables = {"positions": (S, N), "positions of each image": (B, S, N), "no positions": (N,)}
        side = self.shape.image
        images = self.source != "given as patches"
        return Problem(
            patches=(B, S, K),
            weight=(N, K),
            scale=(N,),
            table=tables[self.table],
            dtype=self.dtype,
            table_dtype="float32" if self.table == "no positions" else "bfloat16",
            out_dtype=self.out_dtype,
            geometry=PatchGeometry(self.shape.patch) if images else None,
            images=(B, side, side, 3) if images else None,
        )

    @property
    def cut(self) -> str | None:
        """The argument `cut` of the call."""
        return "kernel" if self.source == "cut by the kernel" else None

    def __str__(self) -> str:
        devices = ", on every device" if self.on_every_device else ""
        return (
            f"{self.backend}: {self.shape.name}, {self.B} images {self.source}, {self.dtype} to "
            f"{self.out_dtype}, {self.table}, {self.launch}{devices}"
        )


def pairwise(
    parameters: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """Yields combinations in which every two values of two parameters occur together.

    Args:
      parameters: the values of each parameter.
      allowed: function that says whether a combination may be used. Pairs of values that occur in
        no such combination are left out.
    """
    names = list(parameters)
    allows = functools.cache(lambda values: allowed(dict(zip(names, values))))
    uncovered = {
        ((i, a), (j, b)): None
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in parameters[names[i]]
        for b in parameters[names[j]]
    }

    def gain(values: tuple[Any, ...]) -> int:
        return sum(pair in uncovered for pair in itertools.combinations(enumerate(values), 2))

    while uncovered:
        pair = next(iter(uncovered))
        fixed = dict(pair)
        choices = [[fixed[i]] if i in fixed else parameters[name] for i, name in enumerate(names)]
        combinations = sorted(itertools.product(*choices), key=gain, reverse=True)
        found = next(filter(allows, combinations), None)
        if found is None:
            del uncovered[pair]
            continue
        for covered in itertools.combinations(enumerate(found), 2):
            uncovered.pop(covered, None)
        yield dict(zip(names, found))


def occurs_in_practice(case: CheckCase) -> bool:
    """Returns whether users may have a case. NaFlex models always have positions of each image."""
    naflex = case.shape.name.startswith("NaFlex")
    return not naflex or case.table == "positions of each image"


def cases_of(
    backend: str,
    serves: Callable[[CheckCase], bool],
    *,
    shapes: Sequence[NamedShape],
    dtypes: Sequence[str],
    batches: Sequence[int] = BATCHES,
    launches: Sequence[str] = tuple(LAUNCHES),
    devices: int = 1,
    many: int = 0,
) -> list[CheckCase]:
    """Returns the cases of a backend.

    Args:
      backend: name of the backend.
      serves: function that says whether the backend serves a case.
      shapes, dtypes, batches, launches: the values that occur in the cases.
      devices: number of devices.
      many: number of images in the large cases that are added; 0 to add none.
    """
    parameters = {
        "shape": shapes,
        "dtype": dtypes,
        "out_dtype": OUT_DTYPES,
        "B": batches,
        "table": TABLES,
        "source": SOURCES,
        "launch": launches,
        "on_every_device": (False, True) if devices > 1 else (False,),
    }

    def allowed(values: dict[str, Any]) -> bool:
        case = CheckCase(backend, **values)
        return occurs_in_practice(case) and serves(case)

    found = [CheckCase(backend, **values) for values in pairwise(parameters, allowed)]
    if many:
        large = [
            *(
                CheckCase(backend, named_shape("B/16 224"), dtype, "bfloat16", many)
                for dtype in dtypes
            ),
            CheckCase(
                backend, named_shape("B/16 224"), "int8", "bfloat16", many, source=SOURCES[2]
            ),
            CheckCase(backend, WIDE, "int8", "bfloat16", 3),
            CheckCase(backend, ODD, "int8", "bfloat16", 67, source=SOURCES[2]),
        ]
        found += [case for case in large if serves(case)]
    return found
