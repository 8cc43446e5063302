"""What a backend is, and its answer to a problem: a plan, or a refusal with its reason."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax

from pallas_patch_embed.chips import Target
from pallas_patch_embed.problem import Problem


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a backend computes a problem.

    Attributes:
      run: (patches, weight, scale, table) -> y, traceable by JAX. With `takes_images` the first
        operand is uint8 images [..., H, W, 3].
      config: tile sizes and so on, in words; empty if there are none.
      takes_images: whether the backend cuts the images into patches itself.
    """

    run: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    config: str = ""
    takes_images: bool = False


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a backend cannot compute a problem.

    Attributes:
      reason: a sentence, or several.
    """

    reason: str


class Backend(Protocol):
    """A module that computes the operator.

    Attributes:
      EVIDENCE: why its results may be trusted.
    """

    @property
    def EVIDENCE(self) -> str: ...

    def plan(self, problem: Problem, target: Target) -> Plan:
        """How it computes the problem on the target: a pure function of the two.

        Raises:
          NotImplementedError: it cannot; the message is the reason.
        """
