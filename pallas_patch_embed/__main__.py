"""`python -m pallas_patch_embed` is the command line."""

from pallas_patch_embed.cli import run

if __name__ == "__main__":
    run()
