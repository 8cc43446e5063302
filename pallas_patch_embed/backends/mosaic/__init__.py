"""The two Pallas Mosaic GPU backends: for Hopper and for Blackwell."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_patch_embed.backends import tiles
from pallas_patch_embed.backends.mosaic import heuristics, launch, sm90, sm100
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.tiles import Grid
from pallas_patch_embed.chips import B200, B300, H200, Chip, Target
from pallas_patch_embed.problem import Problem


@dataclasses.dataclass(frozen=True)
class MosaicBackend:
    """A Pallas kernel as a backend.

    Attributes:
      kernel: its module. `kernel.make(config, grid, problem, interpret, trace)` returns a function
        of patches [M, K], weight, scale, table [period, N] or [N], and the workers' segments.
      chips: the chips that it supports, one for each compute capability.
      config: the type of its configs.
      choose_config: (problem, chip) -> the config of the heuristic.
      list_configs: (problem, chip) -> the configs worth a measurement.
      EVIDENCE: why its results may be trusted.
    """

    kernel: ModuleType
    chips: tuple[Chip, ...]
    config: type
    choose_config: Callable[[Problem, Chip], Any]
    list_configs: Callable[[Problem, Chip], list[Any]]
    EVIDENCE: str

    def plan(
        self,
        problem: Problem,
        target: Target,
        *,
        config: Any = None,
        interpret: bool | plgpu.InterpretGPUParams = False,
        trace: str = "",
    ) -> Plan:
        """How the kernel, or Pallas' interpreter for it, computes a problem on a target.

        Args:
          problem: shapes and dtypes.
          target: where the program runs.
          config: tile sizes and pipeline depth; None for those of `choose_config`.
          interpret: whether the kernel is interpreted, and how.
          trace: folder for a trace of what the warps of each block do first; none if empty.

        Raises:
          NotImplementedError: the kernel cannot serve; the message is the reason.
        """
        chip = self._checked(problem, target)
        if config is None:
            config = self.choose_config(problem, chip)
        else:
            config.check(problem, chip)
        if trace:
            needed = config.shared_memory_bytes(problem)
            needed += launch.trace_bytes(self.kernel.WARPGROUPS)
            launch.check_shared_memory(needed, chip, config)
        grid = config.grid(problem, chip)
        make = functools.partial(self.kernel.make, config, grid, problem, interpret, trace)
        return Plan(functools.partial(_run, problem, grid, make), config=str(config))

    def candidates(self, problem: Problem, target: Target) -> Sequence[Any]:
        """The configs worth a measurement, the heuristic's first."""
        chip = self._checked(problem, target)
        chosen = self.choose_config(problem, chip)
        return (chosen, *(c for c in self.list_configs(problem, chip) if c != chosen))

    def config_of(self, fields: Mapping[str, Any]) -> Any:
        """The config with these fields."""
        return tiles.config_of(self.config, fields)

    def _checked(self, problem: Problem, target: Target) -> Chip:
        """The chip that the kernel is planned for, after all checks that need no config."""
        chip = tiles.chip_for(target, self.chips)
        if chip is None:
            names = " or ".join("{}.{}".format(*chip.capability) for chip in self.chips)
            raise NotImplementedError(f"it needs compute capability {names}; this is {target}.")
        tiles.check_dtype(problem, chip)
        tiles.check_operands(problem)
        return chip


def _run(problem: Problem, grid: Grid, make: Callable[[], Any], *operands: jax.Array) -> jax.Array:
    """Calls the kernel that `make` returns."""

    def compute(patches: jax.Array, *rest: jax.Array) -> jax.Array:
        segments = jnp.asarray(grid.schedule(problem.table_period))
        return make()(patches.reshape(problem.rows, -1), *rest, segments)

    return tiles.flatten_leading_axes(problem, operands, compute)


SM90 = MosaicBackend(
    sm90,
    (H200,),
    sm90.HopperConfig,
    heuristics.choose_sm90,
    heuristics.list_sm90,
    "interpreted with race detection, and compiled for sm_90a in the tests; every element of its "
    "results compared on an H200.",
)
SM100 = MosaicBackend(
    sm100,
    (B200, B300),
    sm100.BlackwellConfig,
    heuristics.choose_sm100,
    heuristics.list_sm100,
    "interpreted with race detection, compiled for sm_100a, and its PTX executed by an emulator in "
    "the tests; not yet run on a Blackwell GPU.",
)
