"""The architecture of a vision encoder, read from a Hugging Face config.json or from arrays."""

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Activations by their names in Hugging Face configs. big_vision uses flax's default, the first.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}

# Default values of SiglipVisionConfig and Siglip2VisionConfig (transformers 5.23).
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "patch_size": 16,
    "image_size": 224,
    "num_patches": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}

# Whether a model is NaFlex, by its model_type. SigLIP2 checkpoints with a fixed resolution are
# published with the model_type of SigLIP.
MODEL_TYPES = {
    "siglip": False,
    "siglip_vision_model": False,
    "siglip2": True,
    "siglip2_vision_model": True,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture of a SigLIP or SigLIP2 vision encoder.

    Attributes:
      width: width of the embedding, D.
      depth: number of transformer blocks.
      heads: number of attention heads, which divides width.
      mlp: width of the MLPs' hidden layer.
      patch: side of a patch in pixels.
      grid: (height, width) of the learned positions, in patches.
      eps: epsilon of the layer norms.
      naflex: whether the encoder accepts patches of images of any aspect ratio, and resizes its
        positions for each image.
      image_size: (height, width) of the images in pixels. It may exceed grid * patch by less than a
        patch; the remainder is dropped. None if naflex.
      activation: the MLPs' activation: "gelu_pytorch_tanh" or its other name "gelu_new", "gelu",
        "quick_gelu" or "relu".
      pooling_head: whether the tower ends in an attention pooling head; None to decide by the
        arrays of the checkpoint.
      channels: channels of the images, 3 for RGB.

    Raises:
      ValueError: a value has a wrong type, or values contradict each other.
    """

    width: int
    depth: int
    heads: int
    mlp: int
    patch: int
    grid: tuple[int, int]
    eps: float = 1e-6
    naflex: bool = False
    image_size: tuple[int, int] | None = None
    activation: str = "gelu_pytorch_tanh"
    pooling_head: bool | None = None
    channels: int = 3

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "mlp", "patch", "channels"):
            check_size(name, getattr(self, name))
        _check_sides("grid", self.grid)
        if self.width % self.heads:
            raise ValueError(
                f"width is {self.width}, expected a multiple of the number of heads, {self.heads}."
            )
        number = isinstance(self.eps, int | float) and not isinstance(self.eps, bool)
        if not number or not 0 < self.eps < 1:
            raise ValueError(
                f"the epsilon of layer norms is {_short(self.eps)}, expected a number between 0 "
                "and 1, such as 1e-6."
            )
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            raise ValueError(
                f"the activation is {_short(self.activation)}, expected one of "
                f"{', '.join(ACTIVATIONS)}."
            )
        for name, types in (("naflex", bool), ("pooling_head", bool | None)):
            if not isinstance(getattr(self, name), types):
                raise ValueError(
                    f"{name} is {_short(getattr(self, name))}, expected True or False."
                )
        if self.naflex and self.image_size is not None:
            raise ValueError(
                f"image_size is {_short(self.image_size)}, expected None for a NaFlex encoder, "
                "which accepts images of any size."
            )
        if self.naflex:
            return
        size = self.image_size
        if size is None:
            size = (self.grid[0] * self.patch, self.grid[1] * self.patch)
            object.__setattr__(self, "image_size", size)
        _check_sides("image_size", size)
        if tuple(side // self.patch for side in size) != self.grid:
            raise ValueError(
                f"image_size is {size[0]} x {size[1]} pixels, which is not a "
                f"{self.grid[0]} x {self.grid[1]} grid of patches of {self.patch} pixels. Change "
                "image_size, grid or patch."
            )

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> "Config":
        """Reads the contents of a Hugging Face config.json.

        Args:
          config: the config of a vision tower, or of a model with a `vision_config`. Missing fields
            get the defaults of SiglipVisionConfig and Siglip2VisionConfig.

        Returns:
          Config.

        Raises:
          ValueError: `config` is not such a config, or a value has a wrong type.
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"the config is {_short(config)}, expected an object of fields.")
        whole, vision = _vision_config(config)
        naflex = _is_naflex(whole, vision)
        fields: dict[str, Any] = {
            name: default if vision.get(name) is None else vision[name]
            for name, default in DEFAULTS.items()
        }
        pooling_head = vision.get("vision_use_head")
        if not isinstance(pooling_head, bool | None):
            raise ValueError(f"vision_use_head is {_short(pooling_head)}, expected true or false.")
        for name, value in fields.items():
            if name not in ("hidden_act", "layer_norm_eps"):
                check_size(name, value)
        patch, S, size = fields["patch_size"], fields["num_patches"], fields["image_size"]
        side = math.isqrt(S) if naflex else size // patch
        if naflex and side * side != S:
            raise ValueError(
                f"num_patches is {S}, expected a square number, because positions form a grid."
            )
        if side == 0:
            raise ValueError(f"image_size is {size}, expected at least patch_size, {patch}.")
        return cls(
            width=fields["hidden_size"],
            depth=fields["num_hidden_layers"],
            heads=fields["num_attention_heads"],
            mlp=fields["intermediate_size"],
            patch=patch,
            grid=(side, side),
            eps=fields["layer_norm_eps"],
            naflex=naflex,
            image_size=None if naflex else (size, size),
            activation=fields["hidden_act"],
            pooling_head=pooling_head,
            channels=fields["num_channels"],
        )


def _vision_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Finds the config of the vision tower; returns the config that contains it, and it.

    The tower's config is the config itself, its innermost field vision_config, or the same of one
    of its fields whose names end in _config, such as vlm_config.
    """
    owners, unread = [], [config]
    while unread:
        part = unread.pop()
        if "vision_config" in part or (part is config and "text_config" in part):
            vision = part.get("vision_config")
            if isinstance(vision, Mapping) and "vision_config" in vision:
                unread.append(vision)
            else:
                owners.append(part)
        elif part is not config and str(part.get("model_type")) in MODEL_TYPES:
            owners.append({"vision_config": part})
        else:
            unread += [
                value
                for name, value in part.items()
                if str(name).endswith("_config") and isinstance(value, Mapping)
            ]
    if len(owners) > 1:
        raise ValueError(
            f"the config contains {len(owners)} fields named vision_config, expected one. Pass "
            "that of the vision tower as config=."
        )
    if not owners:
        return config, config
    vision = owners[0].get("vision_config")
    vision = {} if vision is None else vision
    if not isinstance(vision, Mapping):
        raise ValueError(f"vision_config is {_short(vision)}, expected an object of fields.")
    return owners[0], vision


def _is_naflex(config: Mapping[str, Any], vision: Mapping[str, Any]) -> bool:
    """Returns whether the vision tower is NaFlex, by its own model_type or the whole model's."""
    model_type = vision.get("model_type")
    whole = config.get("model_type")
    if model_type is None and isinstance(whole, str) and whole in MODEL_TYPES:
        model_type = whole
    if model_type is None:
        return vision.get("num_patches") is not None
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type is {_short(model_type)}, expected one of {', '.join(MODEL_TYPES)}. Pass "
            "the config of a SigLIP or SigLIP2 vision tower."
        )
    return MODEL_TYPES[model_type]


def check_size(name: str, value: Any) -> None:
    """Refuses values that are not positive integers below 2^31."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ValueError(f"{name} is {_short(value)}, expected a positive integer below 2^31.")


def _check_sides(name: str, sides: Any) -> None:
    if not isinstance(sides, tuple) or len(sides) != 2:
        raise ValueError(f"{name} is {_short(sides)}, expected a tuple (height, width).")
    for side in sides:
        check_size(f"a side of {name}", side)


def _short(value: Any) -> str:
    return reprlib.repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "too large"
