"""Compiles the Triton kernel for GPUs that are not here, with the assembler that Triton brings along.

Prints a line for each: function, target, number of vector loads, of atomic instructions, bytes spilled.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from gradiometer.capture import kernel, kernel_triton

CHUNK_ARGUMENTS = {
    "addresses": "*i64",
    "lengths": "*i64",
    "owners": "*i32",
    "starts": "*i64",
    "chunks": "*fp64",
}
FOLD_ARGUMENTS = {"chunks": "*fp64", "firsts": "*i32", "lengths": "*i64", "table": "*fp64"}


def compiled(function, arguments, constants, capability):
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True}
    )


def spilled_bytes(ptx, capability):
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = re.search(r"\.target (\w+)", ptx)[1]
        assembler = get_ptxas(capability).path
        command = [assembler, "-v", "--gpu-name", target, source, "-o", source.with_suffix(".cubin")]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"(\d+) bytes spill", told.stdout + told.stderr)))


def main():
    for capability in (80, 90):
        kinds = [
            ("chunk_partials", CHUNK_ARGUMENTS, {
                "ELEMENT": getattr(tl, element), "DTYPE": tl.float64 if element == "float64" else tl.float32,
                "CHUNK": kernel.CHUNK, "BLOCK": kernel.BLOCK,
            })
            for element in kernel._DTYPES.values()
        ]  # fmt: skip
        if capability == 90:
            kinds.append(("fold_chunks", FOLD_ARGUMENTS, {"BLOCK": kernel.FOLD_BLOCK}))
        for name, arguments, constants in kinds:
            ptx = compiled(getattr(kernel_triton, name), arguments, constants, capability).asm["ptx"]
            vectors = len(re.findall(r"ld\.global\S*\.v[24]", ptx))
            atomics = len(re.findall(r"\b(?:atom|red)\.", ptx))
            print(name, f"sm_{capability}", vectors, atomics, spilled_bytes(ptx, capability))


if __name__ == "__main__":
    main()
