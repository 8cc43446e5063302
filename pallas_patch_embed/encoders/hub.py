"""Checkpoints on the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path


def find_checkpoint(name: str, files: Sequence[str] = ("*.json", "*.safetensors")) -> Path:
    """Returns the path of a checkpoint, which is downloaded if it is a model on the hub.

    Args:
      name: a path, or the name of a model on the Hugging Face hub.
      files: patterns of the names of the files that are downloaded.

    Raises:
      FileNotFoundError: there is no such path, and the model cannot be downloaded or
        huggingface_hub is not installed.
    """
    path = Path(name)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/")):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(
            f"There is no file or folder {name!r}. To download a model from the Hugging Face hub, "
            "run: pip install huggingface_hub."
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=[*files]))
    except Exception as error:  # huggingface_hub raises many kinds of errors.
        raise FileNotFoundError(
            f"There is no file or folder {name!r} on this machine, and the Hugging Face hub says: "
            f"{error}"
        ) from error
