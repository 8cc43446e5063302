"""Measured configs: files that `pallas-patch-embed tune` writes, read when a plan is made.

The package has at most one file for a chip, stored/NAME.json; a user's own is asked first. A result
holds for exactly one problem on the chip and with the version of this package that it was measured
with. Files are data: they name a config among those that a backend has, or that nothing is faster
than the heuristic's.
"""

import dataclasses
import functools
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pallas_patch_embed
from pallas_patch_embed.chips import Chip, Target
from pallas_patch_embed.files import written_whole
from pallas_patch_embed.problem import Problem

FORMAT = 1
FOLDER = Path(__file__).with_name("stored")

# The variable that names a user's own file.
VARIABLE = "PATCH_EMBED_TUNED"

HEURISTIC = "from the heuristic"


def describe_problem(problem: Problem) -> dict[str, Any]:
    """What a kernel's time depends on. Equal for problems with other leading axes."""
    return dict(
        dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        rows=problem.rows,
        K=problem.K,
        N=problem.N,
        table=problem.has_table,
        period=problem.table_period,
        images=None if problem.images is None else list(problem.images[-3:]),
        cut=problem.cut,
    )


def describe_chip(chip: Chip | None) -> dict[str, Any]:
    """The fields by which a file's chip is compared with this one; none without an NVIDIA GPU."""
    if chip is None:
        return {}
    return dict(
        name=chip.name, capability=list(chip.capability), multiprocessors=chip.multiprocessors
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """What a search found for one problem with one backend.

    Attributes:
      backend: the backend's name.
      problem: `describe_problem` of the problem.
      config: the fields of the fastest config; None if nothing is faster than the heuristic's.
      date: the day of the measurement.
      times: config in words -> its times: of all that were timed, or of those that came closest.
      refused: config in words -> why it was not timed.
    """

    backend: str
    problem: dict[str, Any]
    config: dict[str, Any] | None
    date: str
    times: dict[str, Any]
    refused: dict[str, str]

    @property
    def key(self) -> str:
        """Tells the results of a file apart."""
        return key_of(self.backend, self.problem)


def key_of(backend: str, described: Mapping[str, Any]) -> str:
    """The key of the result for a described problem with a backend."""
    return json.dumps([backend, described], sort_keys=True)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A file of results.

    Attributes:
      path: path of the file.
      head: format, package (its version), chip, driver and versions.
      results: the results by their keys.
    """

    path: Path
    head: dict[str, Any]
    results: dict[str, Result]

    def mismatch(self, chip: Chip | None) -> str | None:
        """Why its results do not hold for a chip and this package; None if they do."""
        found, here = self.head["chip"], describe_chip(chip)
        if found != here:
            return f"it was measured on {_chip_text(found)}, this is {_chip_text(here)}"
        if self.head["package"] != pallas_patch_embed.__version__:
            return (
                f"it was measured with version {self.head['package']} of this package, this is "
                f"{pallas_patch_embed.__version__}"
            )
        return None


def _chip_text(chip: Mapping[str, Any]) -> str:
    if not chip:
        return "no NVIDIA GPU"
    return "{name} (compute capability {}.{}, {multiprocessors} multiprocessors)".format(
        *chip["capability"], **chip
    )


HEAD = {"format": int, "package": str, "chip": dict, "driver": str, "versions": dict}
CHIP = {"name": str, "capability": list, "multiprocessors": int}
RESULT = {
    "backend": str,
    "problem": dict,
    "config": (dict, type(None)),
    "date": str,
    "times": dict,
    "refused": dict,
}


def read(path: Path) -> Stored:
    """Reads a file.

    Raises:
      ValueError: there is none, or it is damaged; the message says what was found, and what to do.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(
            f"{path}: there is no file of measured configs ({error.strerror}). Correct "
            f"{VARIABLE} or the argument that names it, or write it with "
            "`pallas-patch-embed tune --out`."
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"{path} is no file, expected one that `pallas-patch-embed tune --out` wrote. Correct "
            f"{VARIABLE} or the argument that names it."
        )
    return _read(path, status.st_mtime_ns, status.st_size)


def check_variable() -> None:
    """Raises ValueError if the environment names a file that is damaged or missing."""
    if named := os.environ.get(VARIABLE):
        read(Path(named))


@functools.lru_cache(maxsize=16)
def _read(path: Path, modified: int, size: int) -> Stored:
    """`read`; a file that was modified, or has another size, is read again."""
    del modified, size
    try:
        content = json.loads(path.read_bytes())
        _expect(content, {**HEAD, "results": list}, "the file")
        if content["format"] != FORMAT:
            raise ValueError(f"format is {content['format']}, expected {FORMAT}")
        if content["chip"]:
            _expect(content["chip"], CHIP, "chip")
            if [type(x) for x in content["chip"]["capability"]] != [int, int]:
                raise ValueError(f"capability of chip is {content['chip']['capability']}")
        results: dict[str, Result] = {}
        for number, entry in enumerate(content["results"]):
            _expect(entry, RESULT, f"result {number}")
            result = Result(**entry)
            if result.key in results:
                raise ValueError(f"result {number} repeats an earlier problem")
            results[result.key] = result
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(damaged(path, str(error))) from None
    return Stored(path, {name: content[name] for name in HEAD}, results)


def damaged(path: Path, found: str) -> str:
    """The message that refuses a file."""
    return (
        f"{path} is no file of measured configs: {found}. Remove it, or restore it; "
        "`pallas-patch-embed tune --out` writes such files."
    )


def _expect(value: Any, fields: Mapping[str, Any], what: str) -> None:
    """Raises ValueError if a value of JSON is not an object with these fields and types."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, expected an object")
    if value.keys() != fields.keys():
        raise ValueError(f"{what} has the fields {sorted(value)}, expected {sorted(fields)}")
    for name, kind in fields.items():
        if not isinstance(value[name], kind):
            raise ValueError(f"{name} of {what} is {json.dumps(value[name])[:80]}")


def write(
    path: Path,
    head: Mapping[str, Any],
    results: Iterable[Result],
    outcome: str = "the file was written",
) -> None:
    """Writes a file; it appears whole or not at all. `outcome` is that of `written_whole`."""
    content = {**head, "results": [dataclasses.asdict(result) for result in results]}
    with written_whole(path, outcome) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def new_head(chip: Chip | None, driver: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """The head of a file that is measured here and now."""
    return dict(
        format=FORMAT,
        package=pallas_patch_embed.__version__,
        chip=describe_chip(chip),
        driver=driver,
        versions=dict(versions),
    )


def _files(target: Target, tuned: str | None) -> Iterator[Stored]:
    """The user's file, then the package's for the target's chip, if they are there."""
    if named := tuned or os.environ.get(VARIABLE):
        yield read(Path(named))
    if target.chip is not None:
        path = FOLDER / f"{re.sub('[^a-z0-9]+', '_', target.chip.name.lower())}.json"
        if path.exists():
            yield read(path)


def ignored(target: Target, tuned: str | None = None) -> tuple[str, ...]:
    """Which files are there but do not hold for a target, and why."""
    reasons = ((file, file.mismatch(target.chip)) for file in _files(target, tuned))
    return tuple(f"{file.path} is ignored: {why}." for file, why in reasons if why)


@dataclasses.dataclass(frozen=True)
class Found:
    """What the files say about a problem.

    Attributes:
      config: the fields of a backend's config; None for the heuristic's.
      origin: where the config comes from, in words.
      path: the file; None if no file has the problem.
    """

    config: dict[str, Any] | None
    origin: str
    path: Path | None


def find(backend: str, problem: Problem, target: Target, tuned: str | None = None) -> Found:
    """The measured config of a backend for a problem on a target.

    Args:
      backend: the backend's name.
      problem: shapes and dtypes.
      target: where the program runs. Files are for chips that are known.
      tuned: path of the user's file; None for the one that the environment names, if any.

    Raises:
      ValueError: a file is damaged, or the user's is missing.
    """
    for file in _files(target, tuned) if target.known else ():
        if file.mismatch(target.chip):
            continue
        result = file.results.get(key_of(backend, describe_problem(problem)))
        if result is None or (result.config is None and not result.times):
            continue  # Nothing was measured.
        where = f"tuned on {result.date} ({file.path.name})"
        if result.config is None:
            return Found(None, f"{HEURISTIC}, {where}", file.path)
        return Found(result.config, where, file.path)
    return Found(None, HEURISTIC, None)
