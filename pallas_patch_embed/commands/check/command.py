"""The command `check`: its arguments, its output, its exit code and its report."""

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_patch_embed.backends import BACKENDS, stored
from pallas_patch_embed.base import json_objects, versions
from pallas_patch_embed.base.child import UnkillableError, Wait, poll
from pallas_patch_embed.base.files import check_place, open_regular, written_atomically
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.commands.check import process, work
from pallas_patch_embed.commands.check.cases import SHAPES
from pallas_patch_embed.commands.check.compare import Counts

# Seconds that a launch may take by default. The slowest launch of all cases takes milliseconds.
TIMEOUT = 60.0

# Properties of each GPU that nvidia-smi is asked for.
STATE = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "ecc.mode.current",
)


def add_parser(commands: Any) -> None:
    """Adds the command `check` and its arguments to the command line."""
    parser = commands.add_parser(
        "check",
        help="compare every element that the backends compute on this machine with a reference",
        description="Launches every backend that serves on this machine's GPUs, with new operands "
        "each time, and compares every element with float64. Without a GPU the command checks XLA "
        "and executes kernels in interpreters. Exit code: 0 if all results are right, 1 if a "
        "result is wrong or a launch hangs or crashes, 2 if the arguments are wrong.",
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=tuple(BACKENDS),
        help="check this backend; may be repeated (default: all backends that serve)",
    )
    parser.add_argument(
        "--shapes",
        choices=tuple(SHAPES),
        default="few",
        help="check one model for each kind of shape, or all models (default: few)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="check only the cases whose description contains this text",
    )
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument(
        "--runs",
        type=_positive(int),
        metavar="N",
        help="number of launches of each case (default: "
        f"{work.RUNS_ON_GPU}; {work.RUNS} without a GPU)",
    )
    runs.add_argument(
        "--seconds",
        type=_positive(float),
        metavar="S",
        help="launch each case repeatedly for this number of seconds, instead of --runs",
    )
    parser.add_argument(
        "--timeout",
        type=_positive(float),
        default=TIMEOUT,
        metavar="S",
        help=f"seconds after which a launch counts as hung and is ended (default: {TIMEOUT:g})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the operands (default: 0)")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write the results to this .json file"
    )
    parser.set_defaults(main=run)


def _positive[Number: (int, float)](number: type[Number]) -> Any:
    def positive(text: str) -> Number:
        value = number(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    positive.__name__ = f"positive {number.__name__}"  # argparse shows this name in its messages.
    return positive


@dataclasses.dataclass
class Record:
    """The state of a case.

    Attributes:
      case: description of the case, which begins with the backend's name.
      outcome: as in `process.Ended`; "not begun" before the case is done.
      reason: the reason for an outcome other than "ended".
      counts: the sum of the results of its launches.
    """

    case: str
    outcome: str = "not begun"
    reason: str = ""
    counts: Counts = dataclasses.field(default_factory=Counts)

    @property
    def backend(self) -> str:
        return self.case.split(":")[0]

    @property
    def verdict(self) -> str:
        """The outcome; if the case ended, "right" or "wrong"."""
        if self.outcome != "ended":
            return self.outcome
        return "wrong" if self.counts.all_wrong else "right"

    def __str__(self) -> str:
        line = f"{self.verdict:<9} {self.case}"
        if self.verdict == "wrong":
            c = self.counts
            line += (
                f": {c.wrong} of {c.elements} elements wrong, {c.moved} moved by an ulp, "
                f"{c.changed} bytes changed outside of the result"
            )
        return line + (f": {self.reason}" if self.reason else "")


def run(
    arguments: argparse.Namespace,
    *,
    child: process.Work | None = None,
    wait: Wait = poll,
) -> int:
    """Runs the command: checks all cases, prints the results, and writes the report.

    Args:
      arguments: the parsed arguments of `add_parser`.
      child: function that the child process runs; None for `work.run`.
      wait: function that waits for the child's messages.

    Returns:
      The exit code, 0 or 1.

    Raises:
      ValueError: the arguments are wrong.
    """
    if arguments.report is not None:
        check_place(arguments.report, f"--report is {printable(arguments.report)}", is_report)
    stored.check_variable()
    if not 0 <= arguments.seed < 2**31:
        raise ValueError(f"--seed is {arguments.seed}, expected 0 to 2^31 - 1.")
    options = work.Options(
        backends=tuple(arguments.backend or BACKENDS),
        shapes=arguments.shapes,
        only=arguments.only,
        runs=arguments.runs,
        seconds=arguments.seconds,
        seed=arguments.seed,
    )
    child = child or functools.partial(work.run, options)
    report = Report(arguments.report, options, arguments.timeout)
    try:
        for message in process.supervised(child, timeout=arguments.timeout, wait=wait):
            report.take(message)
    except (process.NoCaseError, UnkillableError) as error:
        report.failure = str(error)
    report.end()
    return 0 if report.is_right else 1


# The types of some fields of a report, by which it is recognized, and its largest size in bytes.
FIELDS: dict[str, type] = {"complete": bool, "all_right": bool, "options": dict, "cases": list}
MOST_BYTES = 2**24


def is_report(path: Path) -> bool:
    """Returns whether `check` wrote this file."""
    try:
        with open_regular(str(path)) as file:
            content = file.read(MOST_BYTES + 1)
        json_objects.expect(json_objects.parse(content), FIELDS, "the report", others=True)
    except (OSError, ValueError):
        return False
    return len(content) <= MOST_BYTES


class Report:
    """The results of all cases, which are printed as they arrive and written after each case.

    Attributes:
      failure: why the check did not finish; empty if it finished.
    """

    def __init__(self, path: Path | None, options: work.Options, timeout: float):
        self._path = path
        self._content: dict[str, Any] = {
            "options": {**dataclasses.asdict(options), "timeout": timeout},
            "about": {},
            "gpus_before": gpus(),
        }
        self._records: list[Record] = []
        self._ended = False
        self.failure = ""

    @property
    def is_right(self) -> bool:
        """Whether no case is wrong, and at least one was compared."""
        verdicts = {record.verdict for record in self._records}
        return not self.failure and "right" in verdicts <= {"right", "left out"}

    def take(self, message: process.Message) -> None:
        """Records a message of the child."""
        match message:
            case process.Listed(about, names):
                self._content["about"] = about
                self._records = [Record(name) for name in names]
                self._check_cases()
                print("\n".join(_introduction(about, len(names))), flush=True)
                self._write()
            case process.Found(case, counts):
                record = self._records[case]
                record.counts = record.counts.plus(Counts(**counts))
            case process.Ended(case, outcome, reason):
                record = self._records[case]
                record.outcome, record.reason = outcome, reason
                print(record, flush=True)
                self._write()

    def _check_cases(self) -> None:
        if self._records:
            return
        options, refused = self._content["options"], self._content["about"]["refused"]
        reasons = " ".join(_refusals(refused))
        if options["only"]:
            raise ValueError(
                f"--only is {options['only']!r}: no case has a description that contains this "
                f"text. {reasons}"
            )
        raise ValueError(f"check: none of the backends serves on this machine. {reasons}")

    def end(self) -> None:
        """Prints the table, and writes the report for the last time."""
        self._ended = True
        self._content["gpus_after"] = gpus()
        self._write()
        print("\n" + "\n".join(_table(self._records)))
        if self.failure:
            print(self.failure)
        if self._path is not None:
            print(f"The report is {printable(self._path)}.")

    def _write(self) -> None:
        if self._path is None:
            return
        found = [
            {
                "case": record.case,
                "verdict": record.verdict,
                **record.counts._asdict(),
                "reason": record.reason,
            }
            for record in self._records
        ]
        content = {
            "complete": self._ended and not self.failure,
            "all_right": self.is_right,
            "failure": self.failure,
            **self._content,
            "cases": found,
        }
        begun = sum(record.outcome != "not begun" for record in self._records)
        outcome = f"{begun} of {len(self._records)} cases are in {printable(self._path)}"
        with written_atomically(self._path, outcome) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")


def _introduction(about: dict[str, Any], cases: int) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    lines = [
        f"pallas_patch_embed {about['pallas_patch_embed']}, Python {about['python']}, {packages}",
        f"driver {about['driver'] or 'absent'}",
        *(f"device: {device['kind']} ({device['target']})" for device in about["devices"]),
    ]
    if about["interpreted"]:
        lines.append(
            "There is no GPU. Interpreters execute the kernels of "
            f"{', '.join(about['interpreted'])} with small problems on this CPU."
        )
    return [*lines, *_refusals(about["refused"]), f"{cases} cases:", ""]


def _refusals(refused: dict[str, dict[str, str]]) -> list[str]:
    """Returns a line for each reason why dtypes of a backend are not checked."""
    lines = []
    for backend, reasons in refused.items():
        for reason in dict.fromkeys(reasons.values()):
            dtypes = ", ".join(dtype for dtype, why in reasons.items() if why == reason)
            lines.append(f"not checked: {backend}, {dtypes}: {reason}")
    return lines


COLUMNS = {
    "backend": lambda name, records: name,
    "cases": lambda name, records: len(records),
    "launches": lambda name, records: sum(r.counts.launches for r in records),
    "elements": lambda name, records: sum(r.counts.elements for r in records),
    "wrong": lambda name, records: sum(r.counts.wrong for r in records),
    "changed": lambda name, records: sum(r.counts.changed for r in records),
    "poisoned": lambda name, records: sum(r.counts.poisoned for r in records),
    "guarded": lambda name, records: sum(r.counts.guarded for r in records),
    "right": lambda name, records: sum(r.verdict == "right" for r in records),
    "hung": lambda name, records: sum(r.verdict == "hung" for r in records),
    "crashed": lambda name, records: sum(r.verdict == "crashed" for r in records),
    "left out": lambda name, records: sum(r.verdict == "left out" for r in records),
}


def _table(records: Sequence[Record]) -> list[str]:
    """Formats a table with one line for each backend."""
    by_backend: dict[str, list[Record]] = {}
    for record in records:
        by_backend.setdefault(record.backend, []).append(record)
    rows = [tuple(COLUMNS)]
    rows += [
        tuple(str(column(name, found)) for column in COLUMNS.values())
        for name, found in by_backend.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def gpus() -> list[dict[str, str | None]]:
    """Asks nvidia-smi for the properties in STATE of each GPU.

    A property is None if nvidia-smi does not know it. The list is empty without nvidia-smi.
    """
    return [
        {name: None if value.startswith("[") else value for name, value in gpu.items()}
        for gpu in versions.nvidia_smi(*STATE)
    ]
