"""Reads the arrays of a checkpoint's files one by one, and checks them. Nothing is unpickled."""

import contextlib
import dataclasses
import json
import math
import re
import reprlib
import textwrap
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from pallas_patch_embed.base.messages import printable, quoted

EXPECTED = (
    "Expected a folder of Hugging Face, timm or open_clip, a .safetensors file or a big_vision "
    ".npz file. Pickles are never loaded; convert them to safetensors."
)

# numpy's names of the supported dtypes, by their names in safetensors. numpy knows "bfloat16"
# because JAX imports ml_dtypes, which registers that name.
SAFETENSORS_FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Functions that read the header of a .npy file, by the version of its format.
NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

# Parts of the names of arrays that replace a float weight, and what they are.
REPLACED = {
    re.compile(r"\.(qweight|qzeros|g_idx)$"): (
        "weights that AWQ or GPTQ, or a similar library, quantised"
    ),
    re.compile(r"\.weight_(packed|scale|shape|zero_point|scale_inv)$"): (
        "weights that compressed-tensors or a similar library quantised"
    ),
    re.compile(r"\.(W_q|weight\._(data|scale|shift)|\w+_(blocks|scales)|codes|codebooks)$"): (
        "weights that a library quantised"
    ),
    re.compile(r"\.(SCB|weight_format|weight\.(absmax|quant_map|quant_state|nested_).*)$"): (
        "weights that bitsandbytes quantised"
    ),
    re.compile(r"\.(lora_\w+|hada_\w+|lokr_\w+|oft_\w+|ia3_\w+|vera_\w+|base_layer)(\.|$)"): (
        "an adapter of PEFT that is not merged into its model"
    ),
    re.compile(r"\.(modules_to_save|original_module)\."): (
        "an adapter of PEFT that is not merged into its model"
    ),
}

# Names of the files of weights, or of the index of their shards.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
OPEN_CLIP = "open_clip_model.safetensors"

# Names of the files that describe the architecture.
CONFIGS = ("config.json", "open_clip_config.json")

# Names of the files of a variant, and of the index of its shards.
VARIANT = re.compile(
    r"model\.[\w-]+\.safetensors(\.index\.json)?|model\.safetensors\.index\.[\w-]+\.json"
)

# The largest magnitude of a weight: it is finite in float32 and in bfloat16.
LARGEST_WEIGHT = float(jnp.finfo(jnp.bfloat16).max)

# Longest name of a file in Linux's file systems, in bytes.
LONGEST_NAME = 255

# Largest factor by which an archive may be compressed. Files of weights are compressed less, zip
# bombs of zeros up to 1032 times. SMALL bytes, which may be arrays of zeros, are exempt.
LARGEST_COMPRESSION = 100
SMALL = 2**24


@dataclasses.dataclass
class Arrays:
    """The arrays of a checkpoint, which are read on demand.

    Attributes:
      names: names of all arrays.
      header: function from a name to (shape, dtype). It reads no values, and refuses dtypes that
        are not supported.
      load: function from a name to the array.
    """

    names: Iterable[str]
    header: Callable[[str], tuple[tuple[int, ...], np.dtype[Any]]]
    load: Callable[[str], np.ndarray]


class Tower:
    """The arrays of a tower, by their names without the prefix."""

    def __init__(self, arrays: Arrays, prefix: str):
        self.arrays, self.prefix = arrays, prefix
        self.names = {n.removeprefix(prefix) for n in arrays.names if n.startswith(prefix)}
        self.unread = set(self.names)

    def has(self, start: str) -> bool:
        """Returns whether the name of any array starts with `start`."""
        return any(name.startswith(start) for name in self.names)

    def blocks(self, block: str) -> int:
        """Returns the number of transformer blocks; `block` precedes their names, with {}."""
        start, _, end = block.partition("{}")
        pattern = re.compile(re.escape(start) + r"(\d{1,4})" + re.escape(end))
        found = filter(None, map(pattern.match, self.names))
        return 1 + max((int(match[1]) for match in found), default=0)

    def shape(self, name: str, *dimensions: int) -> tuple[int, ...]:
        """Returns the shape of an array.

        Raises:
          ValueError: its number of dimensions is not one of `dimensions`.
        """
        shape, _ = self._header(name)
        if len(shape) not in dimensions:
            wanted = " or ".join(map(str, dimensions))
            raise ValueError(
                f"{quoted(self.prefix + name)} has shape {printable(list(shape))}, expected "
                f"{wanted} dimensions."
            )
        return shape

    def read(self, name: str, *shape: int) -> np.ndarray:
        """Reads an array as float32.

        Raises:
          ValueError: the array is missing, or has another shape, another dtype or bad values.
        """
        found, dtype = self._header(name)
        full = self.prefix + name
        if found != shape:
            raise ValueError(
                f"{quoted(full)} has shape {printable(list(found))}, but the config or the other "
                f"arrays imply {list(shape)}. Use the config that belongs to these weights."
            )
        array = self.arrays.load(full)
        if dtype.kind == "V":
            array = array.view(jnp.bfloat16)  # numpy's npz stores bfloat16 as raw bytes.
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not (np.abs(array) <= LARGEST_WEIGHT).all():
            raise ValueError(
                f"{quoted(full)} has values that are NaN, infinite or beyond bfloat16's range. "
                "Check the checkpoint."
            )
        self.unread.discard(name)
        return array

    def _header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Checks the name and the dtype of an array; returns its shape and dtype."""
        full = self.prefix + name
        if name not in self.names:
            raise ValueError(
                f"{quoted(full)} is missing. The file is incomplete, or its config belongs to "
                "another model."
            )
        shape, dtype = self.arrays.header(full)
        floating = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2
        if not floating and dtype != np.dtype("V2"):
            raise _wrong_dtype(full, dtype)
        return shape, dtype

    def check_all_read(self, *ignored: str) -> None:
        """Refuses arrays that were not read, except names that start with one of `ignored`."""
        unused = sorted(name for name in self.unread if not name.startswith(ignored))
        if unused:
            raise ValueError(
                f"{len(unused)} arrays, such as {quoted(self.prefix + unused[0])}, are not part of "
                "a tower with this config. Use the config.json that belongs to these weights."
            )


def check_plain(names: Iterable[str]) -> None:
    """Refuses arrays of quantised weights and of adapters, and says what they are.

    Raises:
      ValueError: a name is that of such an array.
    """
    for name in sorted(names):
        what = next((what for pattern, what in REPLACED.items() if pattern.search(name)), None)
        if what is not None:
            advice = "Dequantise it with the library that made it, and save it in float32."
            if "PEFT" in what:
                advice = "Merge it with PEFT's merge_and_unload, and save the model."
            raise ValueError(f"{quoted(name)} belongs to {what}. {advice}")


def _wrong_dtype(name: str, dtype: Any) -> ValueError:
    return ValueError(
        f"{quoted(name)} has dtype {printable(dtype)}, expected float32, bfloat16 or float16. "
        "Dequantise the checkpoint."
    )


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises ValueError with its name if the contents are not JSON."""
    check_regular(path)
    with _readable(path):
        return json.loads(path.read_text(encoding="utf-8"))


def check_regular(path: Path) -> None:
    """Refuses FIFOs, sockets and devices, because opening a FIFO would wait forever."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{str(path)!r} is not a regular file. {EXPECTED}")


def is_npz(path: Path) -> bool:
    """Returns whether the file is a zip archive, by its contents; False for a folder.

    Raises:
      FileNotFoundError: there is no such file or folder.
      ValueError: its name ends in .npz, but it is not a zip archive.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {str(path)!r}. {EXPECTED}")
    if path.is_dir():
        return False
    check_regular(path)
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    if path.suffix == ".npz" and not is_zip:
        raise ValueError(f"it is not an npz file, because it is not a zip archive. {EXPECTED}")
    return is_zip


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[Arrays]:
    """Opens the arrays of an .npz file. Loading an array verifies its checksum."""
    with _readable(path):
        archive = zipfile.ZipFile(path)
        size, declared = path.stat().st_size, sum(x.file_size for x in archive.infolist())
        if declared > LARGEST_COMPRESSION * size + SMALL:
            raise ValueError(
                f"it has {size} bytes but declares {declared} bytes of uncompressed contents"
            )

    def header(name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        with _readable(name), archive.open(f"{name}.npy") as file:
            read = NPY_HEADERS.get(np.lib.format.read_magic(file))
            if read is None:
                raise ValueError("the version of its numpy format is not 1.0 or 2.0")
            shape, _, dtype = read(file)
            if dtype.hasobject:
                raise ValueError("it contains pickled objects")
            if (
                file.tell() + math.prod(shape) * dtype.itemsize
                != archive.getinfo(f"{name}.npy").file_size
            ):
                raise ValueError("its length differs from the length in its header")
            return shape, dtype

    def load(name: str) -> np.ndarray:
        with _readable(name), archive.open(f"{name}.npy") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
            # zipfile verifies the checksum at the end of the file, to which numpy does not read.
            if file.read():
                raise ValueError("it is longer than the length in its header")
            return array

    with archive:
        names = archive.namelist()
        yield Arrays([n.removesuffix(".npy") for n in names if n.endswith(".npy")], header, load)


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Arrays]:
    """Opens the arrays of a file or a folder. The shards of a folder are opened when needed."""
    folder, shard_of = path.parent, None
    if path.is_dir():
        folder, path = path, _file_in(path)
        if path.suffix == ".json":
            shard_of = _read_index(path)
    with contextlib.ExitStack() as stack:
        opened = {}

        def shard(file: str) -> Any:
            if file not in opened:
                check_regular(folder / file)
                with _readable(folder / file):
                    opened[file] = stack.enter_context(
                        safetensors.safe_open(folder / file, "numpy")
                    )
            return opened[file]

        if shard_of is None:
            shard_of = dict.fromkeys(shard(path.name).keys(), path.name)

        def header(name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
            file = shard(shard_of[name])
            with _readable(f"{quoted(name)} in {shard_of[name]!r}"):
                found = file.get_slice(name)
                shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if dtype not in SAFETENSORS_FLOATS:
                raise _wrong_dtype(name, dtype)
            return shape, jnp.dtype(SAFETENSORS_FLOATS[dtype])

        def load(name: str) -> np.ndarray:
            file = shard(shard_of[name])
            with _readable(f"{quoted(name)} in {shard_of[name]!r}"):
                return file.get_tensor(name)

        yield Arrays(shard_of, header, load)


def _file_in(folder: Path) -> Path:
    """Returns the folder's model.safetensors, or the index of its shards, or those of a variant.

    A variant such as fp16 is a part of the file's name: model.fp16.safetensors, or for shards
    model.safetensors.index.fp16.json.

    Raises:
      ValueError: there is no such file, or there are files of several variants.
    """
    for name in WEIGHTS:
        if (folder / name).exists():
            return folder / name
    if (folder / OPEN_CLIP).exists():
        return folder / OPEN_CLIP
    variants = [path for path in sorted(folder.iterdir()) if VARIANT.fullmatch(path.name)]
    if len(variants) > 1:
        raise ValueError(
            f"the folder has several variants, {', '.join(quoted(x.name) for x in variants)}. Pass "
            "the path of one file."
        )
    if variants:
        return variants[0]
    if (folder / "adapter_config.json").exists() or list(folder.glob("adapter_model.*")):
        raise ValueError(
            "the folder contains an adapter of PEFT without its model. Merge it with PEFT's "
            "merge_and_unload, and save the model."
        )
    raise ValueError(
        "the folder has neither model.safetensors nor model.safetensors.index.json. " + EXPECTED
    )


def folder_of(path: Path) -> Path:
    """Returns the folder of a checkpoint, which is a folder or a file in it."""
    return path if path.is_dir() else path.parent


def config_file(path: Path) -> Path | None:
    """Returns the file in a checkpoint's folder that describes the architecture, if there is one.

    If there are those of two libraries, it is that of the library that has written the weights.
    """
    folder, names = folder_of(path), CONFIGS
    others = any((folder / name).exists() for name in WEIGHTS)
    if path.name.startswith("open_clip") or ((folder / OPEN_CLIP).exists() and not others):
        names = CONFIGS[::-1]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_index(path: Path) -> dict[str, str]:
    """Reads the index of a folder's shards; returns the names of files by the names of arrays."""
    index = read_json(path)
    shard_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shard_of, dict):
        raise ValueError(
            f"{path.name} has no weight_map, expected an object from names of arrays to files."
        )
    for file in shard_of.values():
        plain = isinstance(file, str) and Path(file).name == file and "\0" not in file
        if not plain or file in ("", "..") or len(file) > LONGEST_NAME:
            raise ValueError(
                f"{path.name} names the file {reprlib.repr(file)}, expected a file in the same "
                "folder."
            )
    return shard_of


@contextlib.contextmanager
def _readable(what: Any) -> Iterator[None]:
    """Turns every exception that a reader raises for damaged contents into a ValueError."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise ValueError(f"{what} cannot be read: {error}") from error
    except Exception as error:
        reason = textwrap.shorten(str(error), 200)
        raise ValueError(
            f"{what} is damaged or has another format: {reason}. {EXPECTED}"
        ) from error
