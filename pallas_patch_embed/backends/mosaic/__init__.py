"""The two Pallas Mosaic GPU backends, one for Hopper and one for Blackwell."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_patch_embed.backends import tiles, time_model
from pallas_patch_embed.backends.mosaic import heuristics, launch, sm90, sm100
from pallas_patch_embed.backends.plan import CUTS_NO_IMAGES, Plan
from pallas_patch_embed.backends.tiles import Tiling
from pallas_patch_embed.backends.time_model import Constants
from pallas_patch_embed.base.chips import B200, B300, H200, Chip, Target
from pallas_patch_embed.base.lowering import call_kernel
from pallas_patch_embed.base.problem import LEVELS, Problem


@dataclasses.dataclass(frozen=True)
class MosaicBackend:
    """A Pallas kernel as a backend.

    Attributes:
      kernel: module of the kernel. `kernel.make(config, tiling, problem, interpret, trace)` returns
        a function of patches [M, K], weight, scale, table [period, N] or [N], and the workers'
        segments.
      chips: the chips that the kernel supports, one for each compute capability.
      config: class of the kernel's configs.
      choose_config: function (problem, chip) -> the config that the heuristic chooses.
      list_configs: function (problem, chip) -> the configs that are worth measuring.
      constants: costs of the kernel's work.
      epilogues: whether the kernel computes those of dense layers.
    """

    kernel: ModuleType
    chips: tuple[Chip, ...]
    config: type
    choose_config: Callable[[Problem, Chip], Any]
    list_configs: Callable[[Problem, Chip], list[Any]]
    constants: Constants
    epilogues: bool = False

    def plan(
        self,
        problem: Problem,
        target: Target,
        *,
        config: Any = None,
        interpret: bool | plgpu.InterpretGPUParams = False,
        trace: str = "",
    ) -> Plan:
        """Plans a problem on a target with the kernel, or with Pallas' interpreter.

        Args:
          problem: shapes and dtypes.
          target: where the program runs.
          config: tile sizes and pipeline depth; None for those of `choose_config`.
          interpret: whether the kernel is interpreted, or the parameters of the interpreter.
          trace: folder for a trace that shows the first spans of work of each warp; no trace if it
            is empty.

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
            needed += launch.trace_bytes(config.warpgroups)
            launch.check_shared_memory(needed, chip, config)
        tiling = config.tiling(problem, chip)
        make = functools.partial(self.kernel.make, config, tiling, problem, interpret, trace)
        time = time_model.microseconds(config.work(problem, chip), self.constants, problem.dtype)
        run = functools.partial(_run, problem, tiling, make)
        return Plan(run, config=str(config), microseconds=time if target.known else None)

    def candidates(self, problem: Problem, target: Target) -> Sequence[Any]:
        """Returns the configs that are worth measuring, first the choice of the heuristic."""
        chip = self._checked(problem, target)
        chosen = self.choose_config(problem, chip)
        return (chosen, *(c for c in self.list_configs(problem, chip) if c != chosen))

    def config_of(self, fields: Mapping[str, Any]) -> Any:
        """Returns the config with these fields."""
        return tiles.config_of(self.config, fields)

    def _checked(self, problem: Problem, target: Target) -> Chip:
        """Makes all checks that need no config; returns the chip for which it plans the kernel."""
        chip = tiles.chip_for(target, self.chips)
        if chip is None:
            names = " or ".join("{}.{}".format(*chip.capability) for chip in self.chips)
            raise NotImplementedError(
                f"it needs compute capability {names}; the target is {target}."
            )
        tiles.check_dtype(problem, chip)
        tiles.check_operands(problem, epilogues=self.epilogues)
        if problem.images is not None:
            raise NotImplementedError(CUTS_NO_IMAGES)
        return chip


def _run(problem: Problem, tiling: Tiling, make: Callable[[], Any], *operands: jax.Array) -> Any:
    """Calls the kernel that `make` returns."""

    def compute(
        patches: jax.Array, weight: jax.Array, scale: jax.Array, table: jax.Array, *rest: jax.Array
    ) -> Any:
        segments = jnp.asarray(tiling.schedule(problem.table_period))
        patches = patches.reshape(problem.rows, -1)
        if problem.epilogue.parts:
            weight, scale, table = weight.reshape(-1, problem.K), scale.ravel(), table.ravel()
            rest = tuple(
                value.ravel() if name in LEVELS else value
                for name, value in zip(problem.epilogue.operands, rest)
            )
        return call_kernel(make(), patches, weight, scale, table, segments, *rest)

    return tiles.flatten_leading_axes(problem, operands, compute)


SM90 = MosaicBackend(
    sm90,
    (H200,),
    sm90.HopperConfig,
    heuristics.choose_sm90,
    heuristics.list_sm90,
    time_model.MOSAIC_SM90,
    epilogues=True,
)
SM100 = MosaicBackend(
    sm100,
    (B200, B300),
    sm100.BlackwellConfig,
    heuristics.choose_sm100,
    heuristics.list_sm100,
    time_model.MOSAIC_SM100,
    epilogues=True,
)
