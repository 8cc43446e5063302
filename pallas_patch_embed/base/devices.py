"""Checks of the environment variables with which JAX starts, before a command needs a device."""

import math
import os

from pallas_patch_embed.base.messages import printable, quoted

# The variables for the part of a GPU's memory that JAX reserves; the second one is deprecated.
MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


class NoDeviceError(ValueError):
    """JAX cannot start on this machine; the message says why and what to do."""


def memory_fraction() -> float | None:
    """Returns the part of a GPU's memory that the environment lets JAX reserve, or None.

    Raises:
      NoDeviceError: a variable is not a positive number.
    """
    found = None
    for name in MEMORY_FRACTIONS:
        if not (text := os.environ.get(name)):
            continue
        try:
            fraction = float(text)
        except ValueError:
            fraction = math.nan
        if not 0 < fraction < math.inf:
            raise NoDeviceError(
                f"{name} is {quoted(text)}, expected a positive number, the part of a "
                "GPU's memory that JAX reserves. Correct it, or unset it."
            )
        found = found or fraction
    return found


def check_devices() -> None:
    """Starts JAX on its devices.

    Raises:
      NoDeviceError: JAX cannot start.
    """
    import jax  # Imported here because parents of processes that search for devices need no JAX.

    memory_fraction()
    try:
        jax.devices()
    except Exception as error:  # Some of these are bare AssertionErrors.
        platforms = quoted(os.environ.get("JAX_PLATFORMS", ""))
        why = printable(error) or "the plugin for this platform is not installed"
        raise NoDeviceError(
            f"JAX cannot start: {why}. JAX_PLATFORMS is {platforms}. For an NVIDIA GPU install: "
            "pip install 'pallas_patch_embed[cuda13]'. To use the CPU, set JAX_PLATFORMS=cpu."
        ) from error
