"""The architecture of a vision encoder, and that of a text encoder."""

import dataclasses
import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pallas_patch_embed.base.activations import ACTIVATIONS
from pallas_patch_embed.patch_embedding.params import check_normalisation

# The families, with the mean and the standard deviation with which their published checkpoints
# normalise pixels of 0 to 1.
HALF = (0.5,) * 3, (0.5,) * 3
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPENAI = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
NORMALISATIONS = {
    "siglip": HALF,
    "clip": OPENAI,
    "dinov2": IMAGENET,
    "dinov2_with_registers": IMAGENET,
    "dinov3_vit": IMAGENET,
    "vit": HALF,
    "deit": IMAGENET,
}

# How a tower summarises its tokens in one vector.
POOLINGS = ("attention", "class", "dense", "mean", "none")

# The families of text encoders, and where they take the vector of a text from.
TEXT_FAMILIES = ("siglip", "clip")
TEXT_POOLINGS = ("last", "end", "largest")

# The layers that may lack a bias. "mlp" means both of its layers.
BIASES = ("patch", "query", "key", "value", "out", "mlp")


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture of a vision encoder, and what its checkpoint contains.

    Every encoder is the same transformer: patches with positions, behind class and register tokens;
    blocks of attention and an MLP, each with a layer norm in front and a residual; a last norm.

    Attributes:
      width: width of the embedding, D.
      depth: number of transformer blocks.
      heads: number of attention heads, which divides width.
      mlp: width of the MLPs' hidden layer, M.
      patch: side of a patch in pixels.
      grid: (height, width) of the learned positions, in patches.
      eps: epsilon of the layer norms.
      naflex: whether the encoder accepts patches of images of any aspect ratio, and resizes its
        positions for each image.
      image_size: (height, width) of the images in pixels. It may exceed grid * patch by less than a
        patch; the remainder is dropped. None if naflex.
      activation: the MLPs' activation, one of ACTIVATIONS, such as "gelu_pytorch_tanh", "gelu" or
        "quick_gelu".
      pooling: how pooler_output is computed: "attention" by SigLIP's attention pooling head;
        "class" the first token; "dense" tanh of a dense layer of the first token; "mean" the mean
        of the patches' tokens; "none" not at all. None is what the checkpoint has arrays for:
        "attention" or "dense"; otherwise "class" if there is a class token, else "none".
      channels: channels of the images, 3 for RGB.
      family: one of NORMALISATIONS.
      image_mean, image_std: one number a channel: a pixel u in [0, 1] becomes
        (u - image_mean) / image_std. None for those of the family; they stay None if the family
        has different numbers for the channels of RGB, and the images have other channels.
      class_tokens, registers: numbers of the tokens in front of the patches, in this order. A
        distilled DeiT has two class tokens.
      first_norm: whether a layer norm precedes the first block, as in CLIP.
      norm_after_pooling: whether the last norm is applied to the pooled vector alone, as in CLIP;
        otherwise it is applied to all tokens.
      last_norm: whether there is a last norm. A tower without its last blocks has none.
      gated: whether the MLPs are fc2(activation(gate(x)) * up(x)), as SwiGLU; otherwise they are
        fc2(activation(fc1(x))).
      rope_theta: base of the rotary positions of DINOv3, which replace learned positions; None for
        learned positions.
      layer_scale: whether the results of attention and MLP are scaled by a vector each (LayerScale)
        in the checkpoint. `load_encoder` folds the vectors into the layers in front of them.
      without_bias: the layers that have no bias in the checkpoint, of BIASES.

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
    pooling: str | None = None
    channels: int = 3
    family: str = "siglip"
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    class_tokens: int = 0
    registers: int = 0
    first_norm: bool = False
    norm_after_pooling: bool = False
    last_norm: bool = True
    gated: bool = False
    rope_theta: float | None = None
    layer_scale: bool = False
    without_bias: tuple[str, ...] = ()

    causal: ClassVar[bool] = False  # Only text encoders are.

    @property
    def prefix(self) -> int:
        """The number of class and register tokens in front of the patches."""
        return self.class_tokens + self.registers

    def __post_init__(self) -> None:
        for name in ("width", "heads", "mlp", "patch"):
            check_size(name, getattr(self, name))
        # Arrays are read and numbers are repeated this many times, so it is limited first.
        for name in ("depth", "channels"):
            check_size(name, getattr(self, name), bits=12)
        for name in ("class_tokens", "registers"):
            check_size(name, getattr(self, name), smallest=0)
        _check_sides("grid", self.grid)
        _check_blocks(self)
        _check_one_of("family", self.family, NORMALISATIONS)
        if self.pooling is not None:
            _check_one_of("pooling", self.pooling, POOLINGS)
        switches = ("first_norm", "norm_after_pooling", "last_norm", "gated", "layer_scale")
        for name in ("naflex", *switches):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {short(getattr(self, name))}, expected True or False.")
        if not isinstance(self.without_bias, tuple):
            raise ValueError(f"without_bias is {short(self.without_bias)}, expected a tuple.")
        for name in self.without_bias:
            _check_one_of("a layer without bias", name, BIASES)
        if self.pooling in ("class", "dense") and not self.class_tokens:
            raise ValueError(
                f"pooling is {self.pooling!r}, but there is no class token. Change pooling or "
                "class_tokens."
            )
        if self.naflex and (self.prefix or self.rope_theta is not None):
            raise ValueError("a NaFlex encoder has no class tokens, registers or rotary positions.")
        self._check_rotary()
        for name, values in zip(("image_mean", "image_std"), NORMALISATIONS[self.family]):
            equal = values == values[:1] * len(values)
            if getattr(self, name) is None and (equal or len(values) == self.channels):
                object.__setattr__(self, name, values[:1] * self.channels if equal else values)
        if self.image_mean is not None or self.image_std is not None:
            check_normalisation(self.image_mean, self.image_std, self.channels)
        if self.naflex and self.image_size is not None:
            raise ValueError(
                f"image_size is {short(self.image_size)}, expected None for a NaFlex encoder, "
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

    def _check_rotary(self) -> None:
        theta = self.rope_theta
        if theta is None:
            return
        if not is_number(theta) or not 1 < theta < math.inf:
            raise ValueError(f"rope_theta is {short(theta)}, expected a number above 1.")
        if self.width // self.heads % 4:
            raise ValueError(
                f"rotary positions need heads with a multiple of 4 channels, but width is "
                f"{self.width} and heads is {self.heads}."
            )

    def with_grid(self, grid: tuple[int, ...] | None) -> "Config":
        """Returns the config with the grid that the user gave, if any."""
        if grid is None or grid == self.grid:
            return self
        height, width = grid
        return dataclasses.replace(self, grid=(height, width), image_size=None)

    def first_blocks(self, layers: int) -> "Config":
        """Returns the config of a tower of the first blocks, without last norm and pooling.

        Args:
          layers: number of blocks; or negative, as hidden states are numbered: -1 for all blocks,
            -2 for all but the last.

        Raises:
          ValueError: there are not as many blocks.
        """
        depth = layers if layers > 0 else self.depth + 1 + layers
        if not 0 < depth <= self.depth:
            raise ValueError(
                f"layers is {layers}, but the tower has {self.depth} blocks. Expected 1 to "
                f"{self.depth}, or -1 for all to -{self.depth} for the first."
            )
        return dataclasses.replace(self, depth=depth, last_norm=False, pooling="none")

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> "Config":
        """Reads the contents of a Hugging Face config.json.

        Args:
          config: the config of a vision tower, or of a model with a `vision_config`. Missing fields
            get the defaults of transformers' class for its model_type; without one the config is
            that of a SigLIP tower.

        Returns:
          Config.

        Raises:
          ValueError: `config` is not such a config, or a value has a wrong type.
        """
        from pallas_patch_embed.encoders import hugging_face  # It imports this module.

        return hugging_face.config_of(config)


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The architecture of a text encoder: the transformer of `Config` behind a table of tokens.

    Attributes:
      width, depth, heads, mlp, eps, activation: as in `Config`.
      vocabulary: number of tokens that have an embedding, V.
      length: largest number of tokens of a text, which is that of the learned positions.
      causal: whether a token attends only to itself and to the tokens in front of it, as in CLIP.
      pooling: the token that summarises a text: "last" the last position, which may be padding, as
        in SigLIP; "end" the first token `end_token`; "largest" the first of those with the largest
        number, which is the end token of CLIPs whose config has another one.
      end_token: the number of the end token if pooling is "end", otherwise None.
      family: one of TEXT_FAMILIES.

    Raises:
      ValueError: a value has a wrong type, or values contradict each other.
    """

    width: int
    depth: int
    heads: int
    mlp: int
    vocabulary: int
    length: int
    eps: float = 1e-6
    activation: str = "gelu_pytorch_tanh"
    causal: bool = False
    pooling: str = "last"
    end_token: int | None = None
    family: str = "siglip"

    # What the transformer asks a `Config` for and no text encoder has.
    gated: ClassVar[bool] = False
    naflex: ClassVar[bool] = False
    layer_scale: ClassVar[bool] = False
    norm_after_pooling: ClassVar[bool] = False
    without_bias: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in ("width", "heads", "mlp", "vocabulary", "length"):
            check_size(name, getattr(self, name))
        check_size("depth", self.depth, bits=12)
        _check_blocks(self)
        _check_one_of("family", self.family, TEXT_FAMILIES)
        _check_one_of("pooling", self.pooling, TEXT_POOLINGS)
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal is {short(self.causal)}, expected True or False.")
        if (self.end_token is not None) != (self.pooling == "end"):
            raise ValueError(
                f"end_token is {short(self.end_token)} and pooling is {self.pooling!r}, expected "
                "an end token if pooling is 'end', and None otherwise."
            )
        if self.end_token is not None:
            check_size("end_token", self.end_token, smallest=0)


def check_size(name: str, value: Any, *, smallest: int = 1, bits: int = 31) -> None:
    """Refuses values that are not integers in [smallest, 2^bits)."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or not smallest <= value < 2**bits:
        kind = "a positive integer" if smallest == 1 else f"an integer of at least {smallest}"
        raise ValueError(f"{name} is {short(value)}, expected {kind} below 2^{bits}.")


def check_ratio(ratio: Any) -> None:
    """Refuses an mlp_ratio, which is an MLP's width over the embedding's, that is not a number."""
    if not is_number(ratio) or not 0 < ratio < 1000:
        raise ValueError(f"mlp_ratio is {short(ratio)}, expected a number such as 4.")


def read_sides(name: str, value: Any) -> tuple[int, int]:
    """Reads a size from a JSON file, which is an integer or [height, width]."""
    sides = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2:
        raise ValueError(f"{name} is {short(value)}, expected an integer or [height, width].")
    for side in sides:
        check_size(name, side)
    return sides[0], sides[1]


def check_config(config: Any) -> Mapping[str, Any]:
    """Refuses what is not a JSON object."""
    if not isinstance(config, Mapping):
        raise ValueError(f"the config is {short(config)}, expected an object of fields.")
    return config


def _check_blocks(config: Config | TextConfig) -> None:
    """Checks what the transformer's blocks have."""
    if config.width % config.heads:
        raise ValueError(
            f"width is {config.width}, expected a multiple of the number of heads, {config.heads}."
        )
    if not is_number(config.eps) or not 0 < config.eps < 1:
        raise ValueError(
            f"the epsilon of layer norms is {short(config.eps)}, expected a number between 0 and "
            "1, such as 1e-6."
        )
    _check_one_of("the activation", config.activation, ACTIVATIONS)


def _check_sides(name: str, sides: Any) -> None:
    if not isinstance(sides, tuple) or len(sides) != 2:
        raise ValueError(f"{name} is {short(sides)}, expected a tuple (height, width).")
    for side in sides:
        check_size(f"a side of {name}", side)


def _check_one_of(what: str, value: Any, choices: Iterable[str]) -> None:
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{what} is {short(value)}, expected one of {', '.join(choices)}.")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Shows whole names, such as those of timm's architectures.
_SHORT = reprlib.Repr(maxstring=80)


def short(value: Any) -> str:
    """Returns a short form of any value that a JSON file may contain."""
    return _SHORT.repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "too large"
