"""Each instruction is accepted only with its values of .target."""

import re

import pytest

from tests.ptx_emulator import isa
from tests.ptx_emulator.errors import UnsupportedError
from tests.ptx_emulator.operand_layouts import declared
from tests.ptx_emulator.ptx_runner import HERE, assert_fails, run

WGMMA, TCGEN05 = "9.7.15 wgmma", "9.7.16 tcgen05"

# The targets in the ISA's notes on each instruction.


@pytest.mark.parametrize(
    "statement, targets",
    {
        "wgmma.fence.sync.aligned;": ("sm_90a",),
        "setmaxnreg.dec.sync.aligned.u32 64;": ("sm_90a", "sm_100a", "sm_100f"),
        "tcgen05.fence::after_thread_sync;": ("sm_100a", "sm_100f"),
        "add.f32x2 %address, %address, %address;": ("sm_100", "sm_100a", "sm_100f"),
        "ld.global.v4.b64 {%address, %a_desc, %b_desc, %e}, [%m0];": (
            "sm_100",
            "sm_100a",
            "sm_100f",
        ),
        "fence.proxy.async;": ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f"),
    }.items(),
)
def test_a_statement_is_refused_for_other_targets(statement, targets):
    body = f"{declared(64)} .reg .b64 %e; {statement}{HERE}"
    for target in ("sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f"):
        if target in targets:
            run(body, arrays=[bytes(32)], target=target)
        else:
            message = f"needs a target among {', '.join(targets)}, not {target}"
            assert_fails(UnsupportedError, message, body, arrays=[bytes(32)], target=target)
    for target in ("sm_80", "sm_120a"):
        with pytest.raises(UnsupportedError, match=f"the target {target} is not among"):
            run(body, arrays=[bytes(32)], target=target)


def test_every_form_of_a_family_has_its_targets():
    for opcode, definition in isa.OPCODES.items():
        if opcode.startswith("wgmma"):
            wanted = {"sm_90a"}
        elif "kind::i8" in opcode:
            wanted = {"sm_100a"}
        elif re.match("tcgen05|cp.*cta_group", opcode):
            wanted = {"sm_100a", "sm_100f"}
        elif opcode.startswith("setmaxnreg"):
            wanted = {"sm_90a", "sm_100a", "sm_100f"}
        elif opcode.startswith("tensormap.replace"):
            wanted = {"sm_90a", "sm_100a", "sm_100f"}
        elif "multicast::cluster::all" in opcode:
            wanted = {"sm_100a", "sm_100f"}
        elif re.search(r"f32x2|v4\.[bus]64|clusterlaunchcontrol", opcode):
            wanted = {"sm_100", "sm_100a", "sm_100f"}
        else:
            wanted = {"sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f"}
        assert set(definition.targets) == wanted, opcode
