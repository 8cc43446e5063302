"""Calls a backend through its plan; returns the result, or the reason of a refusal."""

import dataclasses
from typing import Any

import jax

from pallas_patch_embed.base.chips import Chip, Target, default_device
from pallas_patch_embed.base.problem import NO_EPILOGUE, Problem


def few(chip: Chip, multiprocessors: int) -> Target:
    """Returns a chip with few multiprocessors, so that each worker has several tiles."""
    return Target("cuda", dataclasses.replace(chip, multiprocessors=multiprocessors))


def here() -> Target:
    """Returns the GPU that JAX uses, or an unknown target if it uses none."""
    target = Target.of(default_device())
    return target if target.chip is not None else Target.unknown()


def compute(
    backend, *operands, out_dtype, target=None, geometry=None, epilogue=NO_EPILOGUE, **choices
):
    """Computes the operator with one backend.

    Args:
      backend: the backend.
      operands: patches or images, weight, scale, table, and those of the epilogue.
      out_dtype: "bfloat16" or "float32".
      target: where the operator runs; None for `here()`.
      geometry: how images are cut into patches.
      epilogue: that of a dense layer.
      choices: further arguments of the backend's `plan`.
    """
    shapes: list[Any] = [*operands[:4]]
    if parts := epilogue.parts:  # A problem has the columns of all parts of a layer.
        weight, *rows = (x.shape[2:] for x in shapes[1:])
        of_layer = ((parts * weight[0], weight[1]), *((parts * row[0],) for row in rows))
        shapes[1:] = (
            jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(of_layer, shapes[1:])
        )
    problem = Problem.of(*shapes, out_dtype=out_dtype, geometry=geometry)
    problem = dataclasses.replace(problem, epilogue=epilogue)
    return backend.plan(problem, target or here(), **choices).run(*operands)


def refusal(backend, problem, target=None) -> str | None:
    """Returns the reason why a backend cannot serve a problem; None if it can.

    The default target is unknown.
    """
    try:
        backend.plan(problem, target or Target.unknown())
    except NotImplementedError as error:
        return str(error)
    return None
