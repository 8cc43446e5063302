"""What a backend is, and its answer to a problem: a plan, or a refusal with its reason."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

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
      origin: where the config comes from, in words; empty if there is none.
      takes_images: whether the backend cuts the images into patches itself.
    """

    run: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    config: str = ""
    origin: str = ""
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

    def plan(self, problem: Problem, target: Target, *, config: Any = None) -> Plan:
        """How it computes the problem on the target: a pure function of its arguments.

        Args:
          problem: shapes and dtypes.
          target: where the program runs.
          config: one of its configs; None for the one that its heuristic chooses.

        Raises:
          NotImplementedError: it cannot; the message is the reason.
        """

    def candidates(self, problem: Problem, target: Target) -> Sequence[Any]:
        """The configs among which `pallas-patch-embed tune` finds the fastest.

        Configs are frozen dataclasses whose fields JSON can hold. The first is the heuristic's;
        there are none if the backend has none. All pass the checks of `plan`.

        Raises:
          NotImplementedError: it cannot compute the problem; the message is the reason.
        """

    def config_of(self, fields: Mapping[str, Any]) -> Any:
        """The config with these fields, as `dataclasses.asdict` gives them.

        Raises:
          ValueError: it has no such config; the message says what is wrong.
        """
