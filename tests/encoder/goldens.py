"""The checkpoints in tests/data, and the results of the original implementations for them."""

import numpy as np
from safetensors.numpy import load_file

from pallas_patch_embed.siglip2 import batch_naflex
from tests.repository import DATA

# name -> (patch size, layout of the patch embedding's kernel)
GOLDENS = {
    "hf_siglip_p16_224": (16, "OIHW"),
    "hf_siglip_p14_224": (14, "OIHW"),
    "bv_vit_p16_224": (16, "HWIO"),
    "hf_siglip2_naflex_p16": (16, "NK"),
    "bv_naflex_p16": (16, "KN"),
}
NAFLEX = [name for name in GOLDENS if "naflex" in name]
FIXED = [name for name in GOLDENS if "naflex" not in name]


def checkpoint(name):
    """Returns the path of a checkpoint, for `load_encoder`."""
    return DATA / name / "params.npz" if name.startswith("bv") else DATA / name


def arrays(name):
    """Reads all arrays of a checkpoint, by name."""
    if name.startswith("bv"):
        return dict(np.load(checkpoint(name)))
    return load_file(DATA / name / "model.safetensors")


def patch_embedding(name):
    """Reads (kernel, bias, positions) of a checkpoint."""
    stored = arrays(name)
    if name.startswith("bv"):
        names = ("embedding/kernel", "embedding/bias", "pos_embedding")
        return tuple(stored[f"params/img/{key}"] for key in names)
    names = ("patch_embedding.weight", "patch_embedding.bias", "position_embedding.weight")
    return tuple(stored[f"embeddings.{key}"] for key in names)


def expected(name):
    """Reads the arrays of expected.npz."""
    return dict(np.load(DATA / name / "expected.npz"))


def images(name):
    """Returns uint8 images [B, H, W, 3], or for NaFlex a list of [H, W, 3]."""
    data = expected(name)
    if name in FIXED:
        return data["images_u8"]
    return [data[f"image_{i}_u8"] for i in range(len(data["pooler_output"]))]


def encode(encoder, name):
    """Returns the encoder's output for a golden's images, and the mask of the valid tokens."""
    if name in FIXED:
        output = encoder(images(name))
        return output, np.ones(output.last_hidden_state.shape[:2], bool)
    L = expected(name)["last_hidden_state"].shape[1]
    patches, spatial_shapes, mask = batch_naflex(images(name), encoder.config, L)
    return encoder(patches, spatial_shapes=spatial_shapes, mask=mask), mask
