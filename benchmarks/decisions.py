"""Writes the package's file of decisions for a chip from a file of results that `tune` measured.

python -m benchmarks.decisions tuned.json
"""

import argparse
from pathlib import Path

from pallas_patch_embed.backends import stored
from pallas_patch_embed.base.chips import Chip, chip_of

FOLDER = Path(__file__).parent

# The folders of the records for each chip.
FOLDERS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}


def results_of(chip: Chip) -> Path:
    """Returns the path of the results from which the decisions for a chip were written."""
    return FOLDER / FOLDERS[chip.name] / "tuned.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="a file that `tune --out` wrote")
    measured = stored.read(parser.parse_args().results)
    if not (chip := measured.head["chip"]):
        raise SystemExit("The results are not those of an NVIDIA GPU.")
    found = chip_of(tuple(chip["capability"]), chip["multiprocessors"], chip["name"])
    stored.write_decisions(stored.path_of(found), measured)
    print(f"{stored.path_of(found)} was written.")


if __name__ == "__main__":
    main()
