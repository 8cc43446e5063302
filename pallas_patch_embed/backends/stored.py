"""Files of measured configs, which `pallas-patch-embed tune` writes and which plans use.

A user's own file has results with the times of all configs (format 1). The package has at most one
file for a chip, stored/NAME.json, with the decisions alone (format 2), which is read in 1.3 ms
instead of 10.5. benchmarks/ keeps the results from which `benchmarks.decisions` writes it. The
user's file takes precedence.

A result or decision applies to exactly one problem, on the chip and with the version of this
package with which it was measured. It either gives the config that was fastest, or says that no
config is faster than the heuristic's.
"""

import dataclasses
import functools
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pallas_patch_embed
from pallas_patch_embed.base.chips import Chip, Target
from pallas_patch_embed.base.files import open_regular, written_atomically
from pallas_patch_embed.base.json_objects import expect, parse
from pallas_patch_embed.base.messages import printable, quoted
from pallas_patch_embed.base.problem import NO_EPILOGUE, Problem

FORMAT, DECISIONS_FORMAT = 1, 2

# Largest size of a file in bytes. Files for all named shapes have less than a megabyte.
MOST_BYTES = 2**24
FOLDER = Path(__file__).with_name("stored")

# Longer times than this are not measured.
MOST_MILLISECONDS = 1e9

# The environment variable with the path of a user's own file.
VARIABLE = "PATCH_EMBED_TUNED"

HEURISTIC = "from the heuristic"


def describe_problem(problem: Problem) -> dict[str, Any]:
    """Returns the properties of a problem on which a kernel's time depends.

    They do not include how the rows are split into leading axes. "cut" repeats what "images" says:
    a kernel is measured with images only if it cuts them itself.
    """
    return dict(
        dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        rows=problem.rows,
        K=problem.K,
        N=problem.N,
        table=problem.has_table,
        period=problem.table_period,
        images=None if problem.images is None else list(problem.images[-3:]),
        cut=None if problem.images is None else "kernel",
    )


def describe_chip(chip: Chip | None) -> dict[str, Any]:
    """Returns the fields by which chips are compared; no fields if there is no NVIDIA GPU."""
    if chip is None:
        return {}
    return dict(
        name=chip.name, capability=list(chip.capability), multiprocessors=chip.multiprocessors
    )


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search for the fastest config of one backend for one problem.

    Attributes:
      backend: name of the backend.
      problem: `describe_problem` of the problem.
      config: fields of the fastest config; None if no config is faster than the heuristic's.
      date: day of the measurement.
      times: the times of all configs that were timed, or of the fastest of them, by the config's
        description.
      refused: the reason why a config was not timed, by the config's description.
    """

    backend: str
    problem: dict[str, Any]
    config: dict[str, Any] | None
    date: str
    times: dict[str, Any]
    refused: dict[str, str]

    @property
    def key(self) -> str:
        """The key of this result in a file, from the backend and the problem."""
        return key_of(self.backend, self.problem)


def key_of(backend: str, described: Mapping[str, Any]) -> str:
    """Returns the key of the result for a backend and a problem that `describe_problem` made."""
    return json.dumps([backend, described], sort_keys=True)


class Decision(NamedTuple):
    """What was found for a backend and a problem.

    Attributes:
      config: fields of the fastest config; None if no config is faster than the heuristic's.
      date: day of the measurement.
      times: microseconds of a call in a burst, by the config's description; empty in a file of
        decisions.
    """

    config: dict[str, Any] | None
    date: str
    times: Mapping[str, float] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Stored:
    """The contents of a file of results, or of decisions.

    Attributes:
      path: path of the file.
      head: the file's first fields: format, package (version of this package), chip, driver and
        versions.
      results: the results by their keys; empty in a file of decisions.
      decisions: the decisions by the backend and the problem; empty in a file of results.
    """

    path: Path
    head: dict[str, Any]
    results: dict[str, SearchResult] = dataclasses.field(default_factory=dict)
    decisions: dict[tuple[Any, ...], Decision] = dataclasses.field(default_factory=dict)

    def decision(self, backend: str, problem: Problem) -> Decision | None:
        """Returns what was found for a problem; None if nothing was measured."""
        described = describe_problem(problem)
        if self.head["format"] == DECISIONS_FORMAT:
            return self.decisions.get(_decision_key([backend, *described.values()]))
        result = self.results.get(key_of(backend, described))
        if result is None or (result.config is None and not result.times):
            return None
        times = {}
        for name, found in result.times.items():
            if not isinstance(found, dict) or "burst" not in found:
                continue
            burst = found["burst"]
            time: Any = burst.get("milliseconds") if isinstance(burst, dict) else None
            if type(time) not in (int, float) or not 0 < time < MOST_MILLISECONDS:
                what = f"the milliseconds of a burst are {quoted(time)}, expected a positive number"
                raise ValueError(damaged(self.path, what))
            times[name] = 1e3 * time
        return Decision(result.config, result.date, times)

    def mismatch(self, chip: Chip | None) -> str | None:
        """Returns why the results do not apply to a chip and this package; None if they apply."""
        found, here = self.head["chip"], describe_chip(chip)
        if found != here:
            return f"it was measured on {_chip_text(found)}, but this is {_chip_text(here)}"
        if self.head["package"] != pallas_patch_embed.__version__:
            return (
                f"it was measured with version {printable(self.head['package'])} of this package, "
                f"but this is version {pallas_patch_embed.__version__}"
            )
        return None


def _chip_text(chip: Mapping[str, Any]) -> str:
    if not chip:
        return "no NVIDIA GPU"
    text = "{name} (compute capability {}.{}, {multiprocessors} multiprocessors)"
    return printable(text.format(*chip["capability"], **chip))


HEAD: dict[str, type] = {
    "format": int,
    "package": str,
    "chip": dict,
    "driver": str,
    "versions": dict,
}
CHIP: dict[str, type] = {"name": str, "capability": list, "multiprocessors": int}
RESULT: dict[str, type | tuple[type, ...]] = {
    "backend": str,
    "problem": dict,
    "config": (dict, type(None)),
    "date": str,
    "times": dict,
    "refused": dict,
}


def read(path: Path) -> Stored:
    """Reads a file of results.

    Raises:
      ValueError: there is no such file, or it is damaged; the message says what to do.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(
            f"{printable(path)}: the file of measured configs cannot be read ({error.strerror}). "
            f"Correct its path in {VARIABLE} or in the argument, or write the file with "
            "`pallas-patch-embed tune --out`."
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"{printable(path)} is not a regular file, expected a file that `pallas-patch-embed "
            f"tune --out` wrote. Correct its path in {VARIABLE} or in the argument."
        )
    return _read(path, status.st_mtime_ns, status.st_size)


def check_variable() -> None:
    """Raises ValueError if the file that the environment variable names is damaged or missing."""
    if named := os.environ.get(VARIABLE):
        read(Path(named))


@functools.lru_cache(maxsize=16)
def _read(path: Path, modified: int, size: int) -> Stored:
    """Reads a file and caches it, until its time of modification or its size changes."""
    del modified, size
    try:
        with open_regular(str(path)) as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        content = parse(text)
        decided = isinstance(content, dict) and content.get("format") == DECISIONS_FORMAT
        lists = dict.fromkeys(("configs", "decisions") if decided else ("results",), list)
        content = expect(content, {**HEAD, **lists}, "the file")
        if content["format"] not in (FORMAT, DECISIONS_FORMAT):
            raise ValueError(f"format is {content['format']}, expected {FORMAT}")
        if content["chip"]:
            expect(content["chip"], CHIP, "chip")
            if [type(x) for x in content["chip"]["capability"]] != [int, int]:
                found = printable(content["chip"]["capability"])
                raise ValueError(f"capability of chip is {found}, expected two integers")
        results: dict[str, SearchResult] = {}
        decisions = _decisions(content["configs"], content["decisions"]) if decided else {}
        for number, entry in enumerate(content.get("results", ())):
            expect(entry, RESULT, f"result {number}")
            result = SearchResult(**entry)
            if result.key in results:
                raise ValueError(
                    f"result {number} has the backend and the problem of an earlier result"
                )
            results[result.key] = result
    except (ValueError, OSError, RecursionError, TypeError, IndexError) as error:
        raise ValueError(damaged(path, str(error))) from None
    return Stored(path, {name: content[name] for name in HEAD}, results, decisions)


def _decision_key(fields: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(x) if isinstance(x, list) else x for x in fields)


def _decisions(configs: list[Any], rows: list[Any]) -> dict[tuple[Any, ...], Decision]:
    """Reads a row [backend, fields of `describe_problem`, date, index of the config or null]."""
    found = {}
    for row in rows:
        *key, date, index = row
        config = None if index is None else configs[index]
        if not isinstance(date, str) or not isinstance(config, dict | None):
            raise ValueError("a decision has no date, or its config is not an object")
        found[_decision_key(key)] = Decision(config, date)
    return found


def write_decisions(path: Path, measured: Stored) -> None:
    """Writes the decisions of a file of results, one per line."""
    configs: list[dict[str, Any]] = []
    rows = []
    for result in measured.results.values():
        if result.config is None and not result.times:
            continue
        index = None
        if result.config is not None:
            if result.config not in configs:
                configs.append(result.config)
            index = configs.index(result.config)
        rows.append([result.backend, *result.problem.values(), result.date, index])
    head = measured.head | {"format": DECISIONS_FORMAT, "configs": configs}
    begin = json.dumps(head, indent=1).removesuffix("\n}")
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    with written_atomically(path) as file:
        file.write(f'{begin},\n "decisions": [\n{lines}\n]}}\n'.encode())


def damaged(path: Path, found: str) -> str:
    """Returns the message of the error for a file that is damaged."""
    return (
        f"{printable(path)} is not a valid file of measured configs: {found}. Remove it, restore "
        "it, or write it again with `pallas-patch-embed tune --out`."
    )


def write(
    path: Path,
    head: Mapping[str, Any],
    results: Iterable[SearchResult],
    outcome: str = "the file was written",
) -> None:
    """Writes a file of results, one per line. The file appears only when it is complete.

    `outcome` is passed on to `written_atomically`.
    """
    begin = json.dumps(dict(head), indent=1).removesuffix("\n}")
    lines = ",\n".join(json.dumps(dataclasses.asdict(result)) for result in results)
    with written_atomically(path, outcome) as file:
        file.write(f'{begin},\n "results": [\n{lines}\n]}}\n'.encode())


def new_head(chip: Chip | None, driver: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """Makes the head of a file with results that this package measures on this machine."""
    return dict(
        format=FORMAT,
        package=pallas_patch_embed.__version__,
        chip=describe_chip(chip),
        driver=driver,
        versions=dict(versions),
    )


def path_of(chip: Chip) -> Path:
    """Returns the path of the package's file for a chip, which may not exist."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '_', chip.name.lower())}.json"


def _files(target: Target, tuned: str | None) -> Iterator[Stored]:
    """Yields the user's file and then the package's file for the target's chip, if they exist."""
    if named := tuned or os.environ.get(VARIABLE):
        yield read(Path(named))
    if target.chip is not None and (path := path_of(target.chip)).exists():
        yield read(path)


def ignored(target: Target, tuned: str | None = None) -> tuple[str, ...]:
    """Returns a sentence for each file that exists but does not apply to the target."""
    reasons = ((file, file.mismatch(target.chip)) for file in _files(target, tuned))
    return tuple(f"{printable(file.path)} is ignored: {why}." for file, why in reasons if why)


@dataclasses.dataclass(frozen=True)
class Found:
    """The config that the files give for a problem.

    Attributes:
      config: fields of a backend's config; None for the choice of the heuristic.
      origin: description of where the config comes from.
      path: path of the file; None if no file contains the problem.
      times: microseconds of the configs that were timed, by their descriptions.
    """

    config: dict[str, Any] | None
    origin: str
    path: Path | None = None
    times: Mapping[str, float] = MappingProxyType({})


def applicable(target: Target, tuned: str | None = None) -> tuple[Stored, ...]:
    """Returns the files whose results apply to a target, the user's before the package's.

    If the target is not known, no file applies. `tuned` is the path of the user's file, or None for
    the file that the environment variable names, if any.

    Raises:
      ValueError: a file that may apply is damaged, or the user's file is missing.
    """
    if not target.known:
        return ()
    return tuple(file for file in _files(target, tuned) if not file.mismatch(target.chip))


def find(backend: str, problem: Problem, files: Iterable[Stored]) -> Found:
    """Finds the measured config of a backend for a problem in files that apply.

    Raises:
      ValueError: the result of the problem is damaged.
    """
    applies = not problem.is_symbolic and problem.epilogue == NO_EPILOGUE
    for file in files if applies else ():
        decision = file.decision(backend, problem)
        if decision is None:
            continue
        where = f"tuned on {printable(decision.date)} ({printable(file.path.name)})"
        if decision.config is None:
            where = f"{HEURISTIC}, {where}"
        return Found(decision.config, where, file.path, decision.times)
    return Found(None, HEURISTIC)
