"""The Triton kernel's host side: all seven statistics of all gradients of one device and dtype in one pass.

Like torch's multi-tensor kernels it takes a table of addresses, which changes whenever gradients are made anew, and a
table of chunks, which does not. Two launches, one small upload and one small table on its way back; nothing waits for
the device. Without Triton, or where its self-test fails, `eager.read_device` does the work.

Not measured on a GPU yet: see docs/statistics.md.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from gradiometer.capture import eager, readback, statistics
from gradiometer.capture.readback import Readback

VARIABLE: Final = "GRADIOMETER_TRITON"
CHUNK: Final = 1 << 16
"""Elements of one program: enough that a program's start costs little, few enough that small models fill a GPU."""
BLOCK: Final = 1024
FOLD_BLOCK: Final = 256
_MAX_PLANS: Final = 8
"""Sets of gradients that are remembered: parameters may lack a gradient now and then."""
_DTYPES: Final = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_TROUBLE: Final = (
    ImportError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
)
"""What torch and Triton raise without a GPU or a compiler, or in other versions. Triton's own errors join these."""

_known: dict[tuple[torch.device, torch.dtype], str | None] = {}


def is_ready(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel was prepared for such gradients and passed its self-test."""
    return _known.get((device, dtype), "not prepared") is None


def prepare(device: torch.device, dtypes: set[torch.dtype]) -> str | None:
    """Compile the kernel for gradients on `device` and test it; why it is not in use, or None.

    Called by `watch`, not in a step: it compiles (seconds, the first time on a machine) and waits for the device.
    """
    reasons = []
    for dtype in sorted(dtypes, key=str):
        if (device, dtype) not in _known:
            _known[device, dtype] = _problem(device, dtype)
        reasons.append(_known[device, dtype])
    return next((reason for reason in reasons if reason is not None), None)


def _problem(device: torch.device, dtype: torch.dtype) -> str | None:
    if os.environ.get(VARIABLE, "1") == "0":
        return f"{VARIABLE}=0"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1"
    if dtype not in _DTYPES:
        return f"it does not know {dtype}"
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    trouble = (*_TROUBLE, subprocess.SubprocessError, triton.TritonError)
    try:
        return self_test(MultiTensor(device, dtype))
    except trouble as error:
        return f"Triton failed: {error!r}"[:500]


def self_test(kernel: MultiTensor) -> str | None:
    """Compare a kernel with the definition on a few small gradients; what differs, or None. Waits for the device."""
    ramp = torch.linspace(-3.0, 5.0, 2 * BLOCK + 37, dtype=torch.float64)
    broken = torch.tensor([1.0, float("nan"), 0.0, float("-inf")], dtype=torch.float64)
    gradients = [values.to(kernel.dtype) for values in (ramp, torch.zeros(5), ramp[:1], broken)]
    expected = np.stack([statistics.exact(one.to(torch.float64).numpy()) for one in gradients])
    rows = kernel.read([one.to(kernel.device) for one in gradients]).values()
    if np.allclose(rows, expected, rtol=1e-5, atol=1e-4, equal_nan=True):
        return None
    return "its self-test failed: its statistics differ from their definition"


class _Plan:
    """Which chunk is of which gradient, for gradients of these lengths; on the device, and valid on one stream."""

    def __init__(self, lengths: list[int], chunk: int, device: torch.device, stream: int) -> None:
        sizes = np.array(lengths, dtype=np.int64)
        num_chunks = -(-sizes // chunk)
        firsts = np.concatenate([[0], np.cumsum(num_chunks)])
        owners = np.repeat(np.arange(len(lengths)), num_chunks)
        within = np.arange(int(firsts[-1])) - np.repeat(firsts[:-1], num_chunks)
        self.num_chunks = int(firsts[-1])
        self.stream = stream
        self.lengths = _upload(sizes, device)
        self.firsts = _upload(firsts.astype(np.int32), device)
        self.owners = _upload(owners.astype(np.int32), device)
        self.starts = _upload(within.astype(np.int64) * chunk, device)


def _upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on `device`, on its way: from pageable memory the copy would be waited for."""
    pinned = torch.empty(
        values.shape, dtype=torch.from_numpy(values).dtype, device="cpu", pin_memory=device.type == "cuda"
    )
    pinned.numpy()[:] = values
    # torch's caching host allocator keeps the block until the copy is done.
    copy: torch.Tensor = pinned.to(device, non_blocking=True)
    return copy


class MultiTensor:
    """Reads gradients of one device and dtype, and remembers what stays the same from step to step.

    Args:
        device: CUDA, or the CPU where Triton interprets its language (tests).
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, chunk: int = CHUNK, block: int = BLOCK
    ) -> None:
        import triton.language as tl

        from gradiometer.capture import kernel_triton

        self.device, self.dtype = device, dtype
        self._functions: Any = kernel_triton
        self._chunk, self._block = chunk, block
        self._element: Any = getattr(tl, _DTYPES[dtype])
        self._sum_dtype: Any = tl.float64 if dtype == torch.float64 else tl.float32
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._addresses: tuple[list[int], int, torch.Tensor] | None = None

    # Hot path: training thread, once per optimizer step. Must not wait for the device, nor read a value of it.
    def read(self, gradients: list[torch.Tensor]) -> Readback:
        """Statistics of non-empty dense gradients; a table of shape (len(gradients), 7), on its way."""
        flats = [eager.flat(gradient) for gradient in gradients]
        if self.device.type != "cuda":
            return readback.start(self._launch(flats, 0))
        # Triton launches on the current device, which need not be the gradients'.
        with torch.cuda.device(self.device):
            stream = int(torch.cuda.current_stream(self.device).cuda_stream)
            return readback.start(self._launch(flats, stream))

    def _launch(self, flats: list[torch.Tensor], stream: int) -> torch.Tensor:
        plan = self._plan(tuple(values.numel() for values in flats), stream)
        addresses = self._addresses_on_device([values.data_ptr() for values in flats], stream)
        chunks = addresses.new_empty((plan.num_chunks, statistics.WIDTH - 1), dtype=torch.float64)
        table = addresses.new_empty((len(flats), statistics.WIDTH), dtype=torch.float64)
        self._functions.chunk_partials[(plan.num_chunks,)](
            addresses, plan.lengths, plan.owners, plan.starts, chunks,
            ELEMENT=self._element, DTYPE=self._sum_dtype, CHUNK=self._chunk, BLOCK=self._block, enable_fp_fusion=True,
        )  # fmt: skip
        self._functions.fold_chunks[(len(flats),)](chunks, plan.firsts, plan.lengths, table, BLOCK=FOLD_BLOCK)
        return table

    def _plan(self, lengths: tuple[int, ...], stream: int) -> _Plan:
        plan = self._plans.get(lengths)
        # On another stream the upload might not be done yet.
        if plan is None or plan.stream != stream:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[lengths] = _Plan(list(lengths), self._chunk, self.device, stream)
        return plan

    def _addresses_on_device(self, addresses: list[int], stream: int) -> torch.Tensor:
        known = self._addresses
        if known is None or known[0] != addresses or known[1] != stream:
            uploaded = _upload(np.array(addresses, dtype=np.int64), self.device)
            known = self._addresses = (addresses, stream, uploaded)
        return known[2]
