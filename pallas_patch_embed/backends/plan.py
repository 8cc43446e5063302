"""The protocol of a backend, and the plan with which it answers a problem."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.problem import Problem

# The reason of a backend whose kernels read patches only.
CUTS_NO_IMAGES = "it does not cut images itself."


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a backend computes a problem.

    Attributes:
      run: function (patches, weight, scale, table) -> y, traceable by JAX. If the problem has
        images, its first argument is these uint8 images [..., H, W, 3].
      config: description of the config (tile sizes, pipeline depths); empty without a config.
      microseconds: the predicted time; None if the chip or its facts are not known.
    """

    run: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    config: str = ""
    microseconds: float | None = None


class Backend(Protocol):
    """A module or object that computes the operator."""

    def plan(self, problem: Problem, target: Target, *, config: Any = None) -> Plan:
        """Plans the problem on the target. The plan depends only on the arguments.

        Args:
          problem: shapes and dtypes. If it has images, the kernel must cut them itself.
          target: where the program runs.
          config: one of the backend's configs; None for the choice of its heuristic.

        Raises:
          NotImplementedError: the backend cannot compute the problem; the message is the reason.
        """

    def candidates(self, problem: Problem, target: Target) -> Sequence[Any]:
        """Returns the configs among which `pallas-patch-embed tune` finds the fastest.

        Configs are frozen dataclasses whose fields can be written as JSON. All of them pass the
        checks of `plan`, and the first is the choice of the heuristic. The result is empty if the
        backend has no configs.

        Raises:
          NotImplementedError: the backend cannot compute the problem; the message is the reason.
        """

    def config_of(self, fields: Mapping[str, Any]) -> Any:
        """Returns the config with these fields, which have the form of `dataclasses.asdict`.

        Raises:
          ValueError: the backend has no such config; the message says what is wrong.
        """
