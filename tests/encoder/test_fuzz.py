"""Files with random faults: checkpoints, configs, indices and image processors, 1700 in total.

The seeds are fixed. Each file is either loaded, or refused by an error that this package raises
with the file's name; no error comes from inside numpy, zipfile or json. The file's size bounds the
memory that loading takes.
"""

import faulthandler
import io
import json
import math
import random
import shutil
import struct
import traceback
import tracemalloc
import zipfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import pallas_patch_embed
from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.encoders.image_processor import normalisation
from pallas_patch_embed.siglip2 import Config, load_encoder
from tests.short_suite import keep

PACKAGE = Path(pallas_patch_embed.__file__).parent
CASES = 1700
SHARE = 50  # number of cases in one test

# While a file is loaded, Python may allocate BYTES_PER_BYTE bytes for each byte of the file,
# because of float64 copies of packed arrays, and CONSTANT more bytes, of which LZMA takes 8 MiB.
BYTES_PER_BYTE, CONSTANT = 30, 12_000_000

WIDTH, DEPTH, HEADS, MLP, PATCH, SIDE = 8, 2, 2, 12, 4, 3
CONFIG = {
    "model_type": "siglip_vision_model",
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
    "patch_size": PATCH,
    "image_size": SIDE * PATCH,
    "num_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": True,
}
PROCESSOR = {
    "image_processor_type": "SiglipImageProcessor",
    "do_resize": True,
    "size": {"height": SIDE * PATCH, "width": SIDE * PATCH},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_convert_rgb": None,
}

# Values that have caused errors in readers of JSON.
EXTREME = [
    *(None, True, False, 0, -1, 1, 2, 10**9, 2**31, 2**63, 2**64, -(2**63), 10**400, -(10**400)),
    *(0.0, -0.0, 1e-320, 1.0, 1e308, math.nan, math.inf, -math.inf),
    *("", "..", ".", "/", "a/b", "../x", "nul\0", "\ud800", "é" * 300, "x" * 9999, "8", "NaN"),
    *([], {}, [[]], [1, 2], [8, 8], {"height": 8}, {"": 1}, [None] * 99, {"a": {"b": {}}}),
]


def hugging_face_arrays(rng):
    D = WIDTH
    block = {"self_attn.out_proj": (D, D), "mlp.fc1": (MLP, D), "mlp.fc2": (D, MLP)}
    block |= {f"self_attn.{n}_proj": (D, D) for n in "qkv"}
    shapes = {
        "embeddings.patch_embedding": (D, 3, PATCH, PATCH),
        "head.attention.out_proj": (D, D),
        "head.mlp.fc1": (MLP, D),
        "head.mlp.fc2": (D, MLP),
        "post_layernorm": (D,),
        "head.layernorm": (D,),
    }
    for i in range(DEPTH):
        shapes |= {f"encoder.layers.{i}.{name}": shape for name, shape in block.items()}
        shapes |= {f"encoder.layers.{i}.layer_norm{n}": (D,) for n in (1, 2)}
    arrays = {f"{name}.weight": rng.normal(size=shape) for name, shape in shapes.items()}
    arrays |= {f"{name}.bias": rng.normal(size=shape[0]) for name, shape in shapes.items()}
    arrays["embeddings.position_embedding.weight"] = rng.normal(size=(SIDE * SIDE, D))
    arrays["head.attention.in_proj_weight"] = rng.normal(size=(3 * D, D))
    arrays["head.attention.in_proj_bias"] = rng.normal(size=3 * D)
    arrays["head.probe"] = rng.normal(size=(1, 1, D))
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def big_vision_arrays(rng):
    D, h = WIDTH, WIDTH // HEADS
    norm = {"scale": (D,), "bias": (D,)}
    inner = {"kernel": (D, HEADS, h), "bias": (HEADS, h)}
    attention = dict.fromkeys(("query", "key", "value"), inner)
    attention |= {"out": {"kernel": (HEADS, h, D), "bias": (D,)}}
    mlp = {
        "Dense_0": {"kernel": (D, MLP), "bias": (MLP,)},
        "Dense_1": {"kernel": (MLP, D), "bias": (D,)},
    }
    block = {"LayerNorm_0": norm, "MlpBlock_0": mlp, "MultiHeadDotProductAttention_0": attention}
    tree = {
        "embedding": {"kernel": (PATCH, PATCH, 3, D), "bias": (D,)},
        "pos_embedding": (1, SIDE * SIDE, D),
        "MAPHead_0": block | {"probe": (1, 1, D)},
        "Transformer": {"encoder_norm": norm}
        | {f"encoderblock_{i}": block | {"LayerNorm_1": norm} for i in range(DEPTH)},
    }
    leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {
        "/".join(["params/img", *(key.key for key in path)]): rng.normal(size=shape).astype("f")
        for path, shape in leaves
    }


def as_folder(path, arrays, config=CONFIG):
    (path / "config.json").write_text(json.dumps(config))
    save_file(arrays, path / "model.safetensors")
    return path


def as_npz(path, arrays):
    np.savez(path / "params.npz", **arrays)
    return path / "params.npz"


def as_shards(path, arrays):
    (path / "config.json").write_text(json.dumps(CONFIG))
    shard_of = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(arrays)}
    for file in set(shard_of.values()):
        save_file({n: a for n, a in arrays.items() if shard_of[n] == file}, path / file)
    index = {"metadata": {"total_size": 1}, "weight_map": shard_of}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


# Faults in bytes, in JSON values, and in arrays.


def spoil_bytes(draw, content):
    """Changes, removes, doubles or adds a few bytes."""
    content = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 20))):
        at = draw.randrange(len(content) + 1)
        # Short headers are at the beginning of a file, or at the end of a zip file.
        at = draw.choice((at, min(at, draw.randrange(1500)), max(at, len(content) - 2000)))
        length = draw.choice((1, 1, 4, 8, 100, 10**6))
        new = draw.choice(
            (
                lambda n: draw.randbytes(n),
                lambda n: b"\xff" * n,
                lambda n: bytes(n),
                lambda n: b"",
                lambda n, at=at: bytes(content[max(0, at - n) : at]) * 2,
            )
        )
        content[at : at + length] = new(min(length, len(content)))
    return bytes(content)


def spoil_json(draw, value):
    """Replaces, removes, adds or wraps one part of a JSON value."""
    places = [(value, key) for key in (value if isinstance(value, dict) else ())]
    for parent, key in places[:]:
        if isinstance(parent[key], dict):
            places += [(parent[key], inner) for inner in parent[key]]
    parent, key = draw.choice(places)
    match draw.randrange(6):
        case 0:
            del parent[key]
        case 1:
            parent[draw.choice(["", "x", "vision_config", "text_config", "num_patches"])] = (
                draw.choice(EXTREME)
            )
        case 2:
            parent[key] = [parent[key]]
        case 3:
            return draw.choice([parent[key], [value], {"vision_config": value}, *EXTREME])
        case _:
            parent[key] = draw.choice(EXTREME)
    return value


def spoil_text(draw, value):
    """Returns a JSON file with one or several faults in its value, or in its text."""
    for _ in range(draw.choice((1, 1, 3))):
        if isinstance(value, dict) and value:
            value = spoil_json(draw, value)
    text = json.dumps(value).encode()
    match draw.randrange(8):
        case 0:
            return spoil_bytes(draw, text)
        case 1:
            return draw.choice((b"\xef\xbb\xbf", b"[" * 5000, b'{"a":' * 5000, b"\x80")) + text
        case _:
            return text


def spoil_arrays(draw, arrays):
    """Removes one of the arrays, or changes its name, shape, dtype or values."""
    name = draw.choice(sorted(arrays))
    array = arrays[name]
    match draw.randrange(6):
        case 0:
            del arrays[name]
        case 1:
            arrays[draw.choice([name + "x", "a." + name, "x", name.replace("0", "99999")])] = array
        case 2:
            shapes = [(), (0,), array.shape[:-1], (*array.shape, 1), array.T.shape, (1, array.size)]
            arrays[name] = np.resize(array, draw.choice(shapes))
        case 3:
            dtypes = [np.int8, np.uint8, np.bool_, np.int64, np.float16, np.float64]
            dtypes += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
            arrays[name] = array.astype(draw.choice(dtypes))
        case 4:
            arrays[name] = np.array(array)
            value = draw.choice([np.nan, np.inf, -np.inf, 3.4e38, 3.38e38, 1e-45, 1e38])
            arrays[name].flat[draw.randrange(array.size)] = value
        case 5:
            arrays[name] = np.full_like(array, draw.choice([1e19, 1e38, 3.3e38, -3.3e38, 1e-40]))
    return arrays


def spoil_safetensors_header(draw, content):
    """Replaces a file's header by a faulty one, and usually states its right length."""
    (length,) = struct.unpack("<Q", content[:8])
    header, values = spoil_text(draw, json.loads(content[8 : 8 + length])), content[8 + length :]
    length = draw.choice([len(header)] * 6 + [0, 2**63, len(header) + 1])
    return struct.pack("<Q", length) + header + values


def spoil_zip(draw, content):
    """Changes the contents, name or compression of one member of an archive."""
    spoilt = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(spoilt, "w") as new:
        target = draw.choice(old.namelist())
        for name in old.namelist():
            inner = old.read(name)
            method = zipfile.ZIP_STORED
            if name == target:
                method = draw.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
                match draw.randrange(5):
                    case 0:
                        inner = spoil_bytes(draw, inner)
                    case 1:
                        shape = draw.choice(["()", "(8,", "(-8,)", "(2**40,)", f"({10**15},)"])
                        inner = inner.replace(b"(8,)", shape.encode(), 1)
                    case 2:
                        name = draw.choice(["", "../x.npy", "x", name + ".npy", "a\0b.npy", "é"])
                    case 3:
                        inner = inner.replace(b"<f4", draw.choice((b"|O8", b">f4", b"<c8", b"|S4")))
                    case 4:
                        inner = bytes(draw.choice((0, 7, 10**6)))
            new.writestr(name, inner, method)
    return draw.choice([lambda x: x] * 4 + [lambda x: spoil_bytes(draw, x)])(spoilt.getvalue())


# Kinds of files. Each function writes a file with a fault, and returns the path to load.


def rewrite(path, spoil, draw):
    path.write_bytes(spoil(draw, path.read_bytes()))


def bytes_of_safetensors(path, draw, rng):
    as_folder(path, hugging_face_arrays(rng))
    rewrite(path / "model.safetensors", spoil_bytes, draw)
    return path


def header_of_safetensors(path, draw, rng):
    as_folder(path, hugging_face_arrays(rng))
    rewrite(path / "model.safetensors", spoil_safetensors_header, draw)
    return path


def arrays_of_safetensors(path, draw, rng):
    return as_folder(path, spoil_arrays(draw, hugging_face_arrays(rng)))


def config(path, draw, rng):
    as_folder(path, hugging_face_arrays(rng))
    around = {"model_type": "siglip", "text_config": {}, "vision_config": dict(CONFIG)}
    value = draw.choice([dict(CONFIG), around])
    (path / "config.json").write_bytes(spoil_text(draw, value))
    return path


def index(path, draw, rng):
    as_shards(path, hugging_face_arrays(rng))
    rewrite(
        path / "model.safetensors.index.json",
        lambda draw, content: spoil_text(draw, json.loads(content)),
        draw,
    )
    return path


def bytes_of_npz(path, draw, rng):
    file = as_npz(path, big_vision_arrays(rng))
    rewrite(file, spoil_bytes, draw)
    return file


def members_of_npz(path, draw, rng):
    file = as_npz(path, big_vision_arrays(rng))
    rewrite(file, spoil_zip, draw)
    return file


def arrays_of_npz(path, draw, rng):
    return as_npz(path, spoil_arrays(draw, big_vision_arrays(rng)))


def processor(path, draw, rng):
    del rng
    name = draw.choice(("preprocessor_config.json", "processor_config.json"))
    value = dict(PROCESSOR) if name.startswith("pre") else {"image_processor": dict(PROCESSOR)}
    (path / name).write_bytes(spoil_text(draw, value))
    return path


def load(path):
    if list(path.glob("*processor_config.json")):
        config = Config.from_hugging_face(CONFIG)
        found = Preprocessing.of(path, config, None)
        normalisation(path, {}, config)
        return found
    return load_encoder(path, patch_dtype="int8", dtype="float32")


KINDS = [
    bytes_of_safetensors,
    header_of_safetensors,
    arrays_of_safetensors,
    config,
    index,
    bytes_of_npz,
    members_of_npz,
    arrays_of_npz,
    processor,
]


@pytest.mark.parametrize(
    "first", keep(range(0, CASES, SHARE), lambda first: first == 0, "loads fifty files per case")
)
def test_a_fault_is_refused_in_words_or_does_not_matter(tmp_path, first):
    loaded = 0
    for case in range(first, first + SHARE):
        kind = KINDS[case % len(KINDS)]
        path = tmp_path / str(case)
        path.mkdir()
        source = kind(path, random.Random(case), np.random.default_rng(case))
        loaded += survives(source, f"{kind.__name__}, case {case}")
        shutil.rmtree(path)
    assert 0 < loaded < SHARE  # Some faults are harmless, such as a changed `metadata`.


def survives(path, what):
    """Returns whether a file loads; asserts that a refusal is as this module's docstring says."""
    size = sum(file.stat().st_size for file in path.rglob("*")) or path.stat().st_size
    faulthandler.dump_traceback_later(600, exit=True)
    tracemalloc.start()
    try:
        found = load(path)
    except Exception as error:
        assert type(error) is ValueError, what
        message = str(error)
        assert str(path) in message and len(message) < 1500 and "\n" not in message, what
        # A file reader may raise any error, which this package must replace by its own error.
        origin = error.__cause__ or error
        raised_in = Path(traceback.extract_tb(origin.__traceback__)[-1].filename)
        assert raised_in.is_relative_to(PACKAGE) or "damaged" in message, what
        return False
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        faulthandler.cancel_dump_traceback_later()
        assert peak < BYTES_PER_BYTE * size + CONSTANT, what
    for leaf in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Preprocessing)):
        if isinstance(leaf, jax.Array):
            assert np.isfinite(np.asarray(leaf, np.float32)).all(), what
    return True
