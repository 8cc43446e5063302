"""Entry point of the commands `pallas-patch-embed` and `python -m pallas_patch_embed`."""

from pallas_patch_embed import ending, streams


def run() -> None:
    """Runs the command line and ends the process."""
    ending.install()
    streams.open_missing()
    from pallas_patch_embed import cli  # This module imports JAX, which takes a second.

    cli.run()


if __name__ == "__main__":
    run()
