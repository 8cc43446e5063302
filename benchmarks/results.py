"""Results: one record for each contender and regime, written as JSON lines and as tables."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pallas_patch_embed.commands.tune.timing import Timing

REGIMES = {
    "burst": "a few calls after a rest; on a GPU, the time of their kernels",
    "cold": "a few calls after a rest, with operands that are not in a cache",
    "sustained": "wall time of calls without a pause",
    "call": "wall time of one call",
}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The time of one contender on one problem.

    Attributes:
      contender: the contender's name.
      ours: whether the contender is a backend of the operator.
      source: input of the contender, "patches" or "images".
      regime: one of `REGIMES`.
      shape, images, dtype, pixels: the problem.
      milliseconds, low, high: median, 10th and 90th percentile of a call's time.
      calls: number of measured calls.
      clock, power: MHz and W during the calls; None if unknown.
      bytes, operations: bytes and operations that the problem needs at least.
      written: the part of `bytes` that is written.
      floor: milliseconds for `bytes` and `operations` at the ceilings measured in the same run, or
        the time of the fastest contender if that is less.
      peer: name of the fastest peer that computes the whole operator.
      peer_milliseconds: time of that peer.
    """

    contender: str
    ours: bool
    source: str
    regime: str
    shape: str
    images: int
    dtype: str
    pixels: str
    milliseconds: float
    low: float
    high: float
    calls: int
    clock: float | None
    power: float | None
    bytes: int
    operations: int
    written: int
    floor: float | None = None
    peer: str | None = None
    peer_milliseconds: float | None = None

    @property
    def gigabytes_a_second(self) -> float:
        return self.bytes / self.milliseconds / 1e6

    @property
    def teraflops(self) -> float:
        """Returns trillions of operations per second."""
        return self.operations / self.milliseconds / 1e9

    @property
    def images_a_second(self) -> float:
        return 1e3 * self.images / self.milliseconds

    @property
    def joules_a_million_images(self) -> float | None:
        return None if self.power is None else 1e6 * self.power / self.images_a_second

    @property
    def of_peer(self) -> float | None:
        """Returns the time divided by that of the fastest peer."""
        return self.peer_milliseconds and self.milliseconds / self.peer_milliseconds

    @property
    def of_floor(self) -> float | None:
        """Returns the time divided by the floor."""
        return self.floor and self.milliseconds / self.floor

    def record(self) -> dict[str, Any]:
        """Returns all fields and derived values, for JSON."""
        names = ("gigabytes_a_second", "teraflops", "images_a_second", "joules_a_million_images")
        derived = {name: getattr(self, name) for name in (*names, "of_peer", "of_floor")}
        return {"kind": "time"} | dataclasses.asdict(self) | derived


def compared(results: list[Measurement], limits: dict[str, float]) -> list[Measurement]:
    """Returns results of one problem with the fastest peer of each regime and the floor filled in.

    Args:
      results: results of one problem.
      limits: measured bytes per second by kind of access ("copy", "widen") and operations per
        second by dtype. Small problems stay in caches, so the fastest contender may take less time
        than these limits allow.
    """

    def against(r: Measurement) -> Measurement:
        own = [other for other in results if (other.source, other.regime) == (r.source, r.regime)]
        # A bare product computes only a part of the operator.
        peers = [other for other in own if not other.ours and "bare" not in other.contender]
        best = min(peers, key=lambda peer: peer.milliseconds, default=None)
        fastest = min(other.milliseconds for other in own)
        access = "widen" if r.written > 0.6 * r.bytes else "copy"
        needed = (r.bytes / limits[access], r.operations / limits[r.dtype])
        return dataclasses.replace(
            r,
            peer=best and best.contender,
            peer_milliseconds=best and best.milliseconds,
            floor=min(1e3 * max(needed), fastest),
        )

    return [against(r) for r in results]


def result(
    case: Any, source: str, name: str, ours: bool, regime: str, timing: Timing
) -> Measurement:
    """Makes a result from a timing on a `contenders.Case`."""
    return Measurement(
        contender=name,
        ours=ours,
        source=source,
        regime=regime,
        shape=case.shape.name,
        images=case.images,
        dtype=case.dtype,
        pixels=case.pixels,
        **dataclasses.asdict(timing),
        bytes=case.bytes(source),
        operations=case.operations,
        written=case.written,
    )


def append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Appends each record as a line of JSON."""
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the records that `append` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def result_of(record: dict[str, Any]) -> Measurement:
    """Restores a result from its record."""
    return Measurement(
        **{field.name: record[field.name] for field in dataclasses.fields(Measurement)}
    )


# Column of a table -> its meaning. Only GPUs have the columns from "MHz" on.
COLUMNS = {
    "ms": "median time of a call in milliseconds; the fastest contender comes first",
    "10% .. 90%": "10th and 90th percentile of the time",
    "GB/s": "bytes per second, counting those that the problem has to read and write",
    "TFLOP/s": "trillions of multiplications and additions per second",
    "images/s": "images per second",
    "of peer": "time / time of the fastest peer that computes the whole operator; "
    "below 1 is faster",
    "of floor": "time / least time that the ceilings above allow, or time of the fastest "
    "contender if that is less; 1 is the best",
    "MHz": "clock of the GPU during the calls",
    "W": "power of the GPU during the calls",
    "J/million": "energy in joules for a million images",
}


def legend(power: bool) -> str:
    """Explains each column of `table` in a line; `power` adds the columns that only GPUs have."""
    names = list(COLUMNS) if power else list(COLUMNS)[: list(COLUMNS).index("MHz")]
    lines = [f"  {name:<12}{COLUMNS[name]}" for name in names]
    return "\n".join(["Columns:", *lines, "A bare contender computes only the product."])


def left_out(found: dict[tuple[str, str], list[Any]], cases: list[Any]) -> str:
    """Lists everything that was left out of some cases, with the reason.

    Args:
      found: (what was left out, reason) -> the `contenders.Case`s from which it was left out.
      cases: all cases that were measured.

    Returns:
      A line for each entry of `found`. If the entry does not concern all cases, the line names the
      properties that its cases share.
    """

    def values(cases: list[Any]) -> dict[str, str]:
        """Lists the values of each field in these cases."""
        found = {
            "shape": [case.shape.name for case in cases],
            "images": [str(case.images) for case in cases],
            "dtype": [case.dtype for case in cases],
            "pixels": [case.pixels for case in cases],
        }
        return {name: ", ".join(dict.fromkeys(every)) for name, every in found.items()}

    lines = ["Left out:"]
    for (what, reason), own in found.items():
        shared = [f"{k} {v}" for k, v in values(own).items() if v != values(cases)[k]]
        scope = "; ".join(shared)
        lines.append(f"  {what}{scope and f' ({scope})'}: {reason}")
    return "\n".join(lines)


def _short(number: float) -> str:
    """Formats a number with at least three digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def table(results: list[Measurement]) -> str:
    """Formats results of one problem, source and regime as an aligned table, the fastest first."""
    width = max(len(r.contender) for r in results) + 2
    power = any(r.power is not None for r in results)
    head = f"{'':{width}}{'ms':>9}{'10% .. 90%':>20}{'GB/s':>8}{'TFLOP/s':>9}{'images/s':>12}"
    head += f"{'of peer':>9}{'of floor':>9}"
    head += f"{'MHz':>7}{'W':>5}{'J/million':>11}" if power else ""
    lines = [head]
    for r in sorted(results, key=lambda r: r.milliseconds):
        spread = f"{r.low:.4f} .. {r.high:.4f}"
        line = f"{r.contender:{width}}{r.milliseconds:9.4f}{spread:>20}"
        line += f"{_short(r.gigabytes_a_second):>8}{_short(r.teraflops):>9}"
        line += f"{_short(r.images_a_second):>12}"
        for ratio in (r.of_peer, r.of_floor):
            line += f"{'' if ratio is None else f'{ratio:.3f}':>9}"
        if r.power is not None:
            line += f"{r.clock:7.0f}{r.power:5.0f}{r.joules_a_million_images:11.1f}"
        lines.append(line)
    return "\n".join(lines)
