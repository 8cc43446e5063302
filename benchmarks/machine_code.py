"""Reads instructions, their classes and loops from the output of nvdisasm or cuobjdump."""

import collections
import dataclasses
import importlib.util
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
LABEL = re.compile(r"^\s*(\.L_x_\d+):")

CLASSES = {
    name: frozenset(opcodes.split())
    for name, opcodes in {
        "tensor": "HMMA IMMA QMMA HGMMA IGMMA QGMMA UTCHMMA UTCIMMA UTCQMMA",
        "tensor memory": "LDTM STTM UTCATOMSWS",
        "shared": "LDS STS LDSM STSM STAS ATOMS",
        "global": "LD ST LDG STG LDGSTS ATOM ATOMG RED",
        "local": "LDL STL",
        "TMA": "UTMALDG UTMASTG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP UBLKPF",
        "barrier": "SYNCS BAR DEPBAR LDGDEPBAR UTCBAR WARPSYNC WARPGROUP MEMBAR FENCE ERRBAR "
        "CGAERRBAR UCGABAR_ARV UCGABAR_WAIT CCTL NANOSLEEP",
        "float": "FADD FFMA FFMA2 FMUL FMNMX HFMA2 HADD2 HMUL2 FSETP FSEL MUFU",
        "integer": "IABS IADD IADD3 IMAD IMNMX VIMNMX ISETP LEA LOP3 POPC FLO SHF SGXT BMSK VIADD "
        "UIADD3 UIMAD UISETP ULEA ULOP3 USHF USGXT UFLO REDUX",
        "conversion": "F2F F2FP F2I F2IP I2F I2FP I2IP",
        "move and control": "MOV UMOV PRMT UPRMT SEL USEL R2UR CS2R S2R S2UR P2R R2P LDC LDCU ULDC "
        "SHFL ELECT VOTE VOTEU PLOP3 UPLOP3 BRA BSSY BSYNC BREAK CALL RET EXIT NOP BPT YIELD "
        "USETMAXREG UVIRTCOUNT",
    }.items()
}

MATRIX = re.compile(r"[HIQ]G?MMA|UTC[HIQ]MMA")


def class_of(opcode: str) -> str:
    """Returns the class of an opcode, with or without modifiers; "other" if it has no class."""
    name = opcode.split(".")[0]
    return next((found for found, opcodes in CLASSES.items() if name in opcodes), "other")


def access_bytes(opcode: str) -> int:
    """Returns the bytes that a load or store moves per thread, from the opcode's modifiers."""
    if matrices := re.search(r"\.MT?88(?:\.(\d))?", opcode):
        return 4 * int(matrices[1] or 1)
    width = re.search(r"\.[US]?(8|16|64|128)\b", opcode)
    return int(width[1]) // 8 if width else 4


def opcodes(lines: list[str]) -> collections.Counter:
    """Counts instructions by opcode, with modifiers."""
    found = collections.Counter()
    for match in filter(None, map(INSTRUCTION.search, lines)):
        opcode = match[1] + re.match(r"[^\s;]*", match[2])[0]
        # The first source of wgmma is a register if patches are in registers, else it is a
        # descriptor.
        if "GMMA" in opcode and re.match(r"\S* R\w+, R", match[2]):
            opcode += " RS"
        found[opcode] += 1
    return found


def count(lines: list[str]) -> dict[str, int]:
    """Counts instructions by opcode, without modifiers."""
    found = (INSTRUCTION.search(line) for line in lines)
    return dict(collections.Counter(match[1].split(".")[0] for match in found if match))


def innermost_loop(sass: str, opcode: re.Pattern) -> list[str]:
    """Returns the lines of the innermost loop that contains all instructions of these opcodes."""
    lines = sass.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line))}
    matching = [
        i
        for i, line in enumerate(lines)
        if (match := INSTRUCTION.search(line)) and opcode.match(match[1])
    ]
    loops = []
    for end, line in enumerate(lines):
        match = INSTRUCTION.search(line)
        target = re.search(r"\.L_x_\d+", match[2]) if match and match[1].startswith("BRA") else None
        start = labels.get(target[0]) if target else None
        if matching and start is not None and start <= matching[0] and matching[-1] <= end:
            loops.append((end - start, start, end))
    if not loops:
        return []
    _, start, end = min(loops)
    return lines[start : end + 1]


def gaps(lines: list[str], opcode: re.Pattern) -> list[int]:
    """Counts the instructions between consecutive instructions of these opcodes."""
    found = filter(None, map(INSTRUCTION.search, lines))
    matching = [i for i, match in enumerate(found) if opcode.match(match[1])]
    return [after - before - 1 for before, after in itertools.pairwise(matching)]


def jumped_over(lines: list[str], opcode: re.Pattern) -> list[str]:
    """Returns the shortest range from a branch to its target with all instructions of an opcode."""
    found = [INSTRUCTION.search(line) for line in lines]
    matching = [i for i, match in enumerate(found) if match and opcode.match(match[1])]
    labels = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line))}
    parts = []
    for begin, match in enumerate(found):
        target = re.search(r"\.L_x_\d+", match[2]) if match and match[1] == "BRA" else None
        end = labels.get(target[0], 0) if target else 0
        if matching and begin < matching[0] and matching[-1] < end:
            parts.append(lines[begin + 1 : end])
    return min(parts, key=len, default=[])


def executed(sass: str, marker: str, steps: int) -> dict[str, int]:
    """Counts how often a warp executes each opcode for one tile.

    Args:
      sass: machine code of one kernel.
      marker: pattern of opcodes; the tile loop is the innermost loop with all instructions that
        match it.
      steps: number of times that a tile executes the part with the matrix multiplications. This
        part is an inner loop, or the whole tile loop without the stores, which only the last step
        executes.

    Raises:
      NotImplementedError: no loop contains all of these instructions.
    """
    lines = innermost_loop(sass, re.compile(marker))
    if not lines:
        raise NotImplementedError(
            f"no loop of the machine code contains all instructions that match {marker}."
        )
    repeated = innermost_loop("\n".join(lines), MATRIX)
    once, again = opcodes(lines), opcodes(repeated)
    again.subtract(opcodes(jumped_over(repeated, re.compile("STG"))))
    return {opcode: n + (steps - 1) * again[opcode] for opcode, n in once.items()}


@dataclasses.dataclass(frozen=True)
class Code:
    """A compiled kernel.

    Attributes:
      name: name of the kernel's entry.
      registers: registers per thread at launch.
      stack_bytes: bytes of stack per thread.
      spill_bytes: bytes of spill stores and spill loads per thread.
      sass: the machine code.
    """

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    sass: str = dataclasses.field(repr=False)


def cuda_root() -> Path | None:
    """Finds the folder in which pip put ptxas and nvdisasm; None if they are not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        root = Path(folder) / "cu13"
        if (root / "bin" / "ptxas").exists() and (root / "bin" / "nvdisasm").exists():
            return root
    return None


def read_cubin(cubin: bytes) -> list[Code]:
    """Reads the kernels in a cubin.

    Raises:
      NotImplementedError: nvdisasm is not installed.
    """
    if cuda_root() is None:
        raise NotImplementedError("nvdisasm is missing: pip install '.[codegen]'")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuda_root() / "bin" / "nvdisasm", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def attribute(name: str) -> dict[str, int]:
        pattern = rf"EIATTR_{name}\n.*?index@\(([\w$]+)\).*?\.word\s+0x(\w+)"
        return {kernel: int(x, 16) for kernel, x in re.findall(pattern, text, re.DOTALL)}

    registers, stack = attribute("REGCOUNT"), attribute("FRAME_SIZE")
    found = []
    for sass in text.split(".section\t.text.")[1:]:
        name = sass[: sass.index(",")]
        local = opcodes([line for line in sass.splitlines() if "LDL" in line or "STL" in line])
        spilled = sum(access_bytes(x) * n for x, n in local.items() if class_of(x) == "local")
        found.append(Code(name, registers[name], stack[name], spilled, sass))
    return found


def cubins(library: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields capability (90, ...) and content of each uncompressed cubin in a library."""

    def number(at: int, size: int) -> int:
        return int.from_bytes(library[at : at + size], "little")

    for match in re.finditer(rb"\x7fELF\x02", library):
        at = match.start()
        # In ELF, e_machine is 190 for CUDA. The file ends with the tables at e_phoff and e_shoff.
        if number(at + 18, 2) == 190:
            programs = number(at + 32, 8) + number(at + 54, 2) * number(at + 56, 2)
            sections = number(at + 40, 8) + number(at + 58, 2) * number(at + 60, 2)
            yield library[at + 49], library[at : at + max(programs, sections)]
