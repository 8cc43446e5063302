"""The protocol of a backend, and its answers to a problem: a plan, or a refusal with a reason."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.problem import Problem


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a backend computes a problem.

    Attributes:
      run: function (patches, weight, scale, table) -> y, traceable by JAX. If `takes_images`, its
        first argument is uint8 images [..., H, W, 3].
      config: description of the config (tile sizes, pipeline depths); empty without a config.
      origin: description of where the config comes from; empty without a config.
      takes_images: whether the backend cuts the images into patches itself.
    """

    run: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    config: str = ""
    origin: str = ""
    takes_images: bool = False


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The reason why a backend cannot compute a problem.

    Attributes:
      reason: one or several sentences.
    """

    reason: str


class Backend(Protocol):
    """A module or object that computes the operator.

    Attributes:
      EVIDENCE: how the results of the backend are checked.
    """

    @property
    def EVIDENCE(self) -> str: ...

    def plan(self, problem: Problem, target: Target, *, config: Any = None) -> Plan:
        """Plans the problem on the target. The plan depends only on the arguments.

        Args:
          problem: shapes and dtypes.
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
