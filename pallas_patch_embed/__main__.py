"""Entry point of the commands `pallas-patch-embed` and `python -m pallas_patch_embed`."""

import sys

from pallas_patch_embed.base import ending, streams


def run() -> None:
    """Runs the command line and ends the process."""
    streams.open_missing()
    ending.install()
    try:
        # This module imports JAX, which takes a second.
        from pallas_patch_embed.commands import cli
    except ValueError as error:  # JAX reads its environment variables when it is imported.
        print(f"JAX cannot be imported: {error}.", file=sys.stderr)
        sys.exit(2)
    cli.run()


if __name__ == "__main__":
    run()
