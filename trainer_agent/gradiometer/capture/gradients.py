"""One pass over the gradients of one watch: every parameter's local gradient, whatever holds it.

Plain tensors, DTensors (their local shard, no dispatch), FSDP1's flat pieces, empty shards, missing gradients, sparse
and half-precision gradients. What cannot be read is left out (count 0) and reported once with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from gradiometer import wire
from gradiometer.capture import layout, statistics
from gradiometer.capture.backends import REAL_DTYPES, Backends, Blocks, Found, OnlyNorms, known_finite
from gradiometer.capture.backlog import BEHIND, Backlog, Hold
from gradiometer.capture.histograms import Histogram, joined
from gradiometer.capture.layout import Layout, Places
from gradiometer.capture.readback import Readback
from gradiometer.capture.statistics import Floats
from gradiometer.capture.tiers import EVERY_STEP, Cadence
from gradiometer.histograms import Wish, Wishes

_MAX_LISTED: Final = 5
MAX_HISTOGRAM_LAYERS: Final = 8000
"""More of them in one step would not fit into a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """Statistics of one step on their way to the agent's thread.

    Attributes:
        layout: what the rows mean.
        blocks: row numbers in the table, and the rows.
        statistics: the columns: `wire.STATISTICS` or `wire.NORM_STATISTICS`.
        holds: their memory, on the reader's account.
        unread: rows whose gradient exists but could not be read; see `wire.STATISTICS` for how that is told.
        histogram: of the same gradients, in a step in which somebody wanted it.
    """

    layout: Layout
    blocks: Blocks
    statistics: tuple[str, ...] = wire.STATISTICS
    unread: tuple[int, ...] = ()
    holds: tuple[Hold, ...] = ()
    histogram: Histogram | None = None

    def table(self) -> Floats:
        """Float64, shape (layers, statistics), multiplied by the loss scale if the gradients were. Agent thread only."""
        table = np.zeros((len(self.layout.layers), len(self.statistics)))
        for rows, readback in self.blocks:
            table[rows] = readback.values()
        if self.unread:
            table[list(self.unread), self.statistics.index("sum_squares")] = np.nan
        return table


def combine(pieces: Sequence[tuple[Partials, Readback | None]]) -> tuple[Partials | None, Readback | None]:
    """One step's table from what was read for several optimizers, each with the loss scale it was multiplied by."""
    if len(pieces) <= 1:
        return pieces[0] if pieces else (None, None)
    newest = pieces[-1][0]
    is_full = all(partials.statistics == wire.STATISTICS for partials, _ in pieces)
    common = wire.STATISTICS if is_full else wire.NORM_STATISTICS
    blocks: list[tuple[list[int], Readback]] = []
    unread: list[int] = []
    holds: list[Hold] = []
    taken: list[tuple[Histogram | None, Readback | None]] = []
    for partials, scale in pieces:
        # Rows mean something else where an optimizer got another group in the middle of a step.
        if partials.layout is newest.layout:
            for rows, found in partials.blocks:
                read = found if partials.statistics == common else OnlyNorms(found)
                blocks.append((rows, read if scale is None else _Unscaled(read, scale, common)))
            unread += partials.unread
            holds += partials.holds
            taken.append((partials.histogram, scale))
    whole = replace(
        newest,
        blocks=tuple(blocks),
        statistics=common,
        unread=tuple(unread),
        holds=tuple(holds),
        histogram=joined(taken),
    )
    return whole, None


class _Unscaled:
    """Rows of a table divided by the loss scale."""

    __slots__ = ("_rows", "_scale", "_statistics")

    def __init__(self, rows: Readback, scale: Readback, names: tuple[str, ...]) -> None:
        self._rows, self._scale, self._statistics = rows, scale, names

    def values(self) -> Floats:
        """See `Readback`."""
        scale = float(self._scale.values().ravel()[0])
        return statistics.unscale(self._rows.values(), scale, self._statistics)


class GradientReader:
    """Reads the gradients of the parameters that one optimizer updates.

    Args:
        unavailable: told a metric and the reason why it cannot be collected; may be told again.
        sharded: parameters that differ from rank to rank, see `layout.Places`.
        cadence: which steps are read in full.
        wishes: in which steps histograms are taken; None: in none.
        layouts: gives those of all watches of the run, as far as they are built.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        prefix: str,
        unavailable: Callable[[str, str], None],
        sharded: Places | None = None,
        cadence: Cadence = EVERY_STEP,
        wishes: Wishes | None = None,
        layouts: Callable[[], Iterable[Layout]] = tuple,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._prefix = prefix
        self._unavailable = unavailable
        self._sharded, self._wishes = sharded, wishes
        self._layout: Layout | None = None
        self._layouts = layouts
        self._unread: dict[int, str] = {}
        self._parts: dict[int, _Part] = {}
        self._cadence, self._backends, self._backlog = cadence, Backends(), Backlog()

    @property
    def layout(self) -> Layout:
        """The current layers; built at first use, and again when the optimizer got other parameters."""
        if self._layout is None or not layout.updates(self._optimizer, self._layout.updated):
            self._unread.clear()
            try:
                others = [one for one in self._layouts() if one is not self._layout]
                self._layout = layout.build(self._model, self._optimizer, self._prefix, self._sharded, others)
                for note in self._layout.notes:
                    self._unavailable("grad/layers", note)
            except layout.LayoutError as error:
                self._unavailable("grad/layers", str(error))
                # Without layers, so that it is not tried again at every step.
                self._layout = Layout(
                    layers=(),
                    parameters=(),
                    updated=tuple(layout.updated_by(self._optimizer)),
                    notes=(str(error),),
                )
        return self._layout

    @property
    def built(self) -> Layout | None:
        """The current layers, if they were asked for before."""
        return self._layout

    def owners(self, of: Any = None) -> Sequence[torch.Tensor]:
        """The parameters behind the layers, each once: all, or those of one of several optimizers."""
        return self.layout.owners if of is None else self._part(of).owners

    def _part(self, of: Any) -> _Part:
        known = self._parts.get(id(of))
        # Only its own groups are looked at: with an optimizer per parameter, to look at all would be quadratic.
        if known is None or known.layout is not self._layout or not layout.updates(of, known.updated):
            known = self._parts[id(of)] = _Part(self.layout, of)
        return known

    # Hot path: training thread, once per optimizer step. Must not change a tensor, read a value of a device
    # tensor, dispatch on a DTensor (it may run a collective) or keep a reference to a gradient.
    @torch.no_grad()
    def read(self, of: Any = None) -> Partials:
        """Statistics of the gradients as they are now: of all, or of one of several optimizers."""
        current = self.layout if of is None else self._part(of).layout
        if current.is_outdated():
            self._layout = None
            current = self.layout
        rows = range(len(current.parameters)) if of is None else self._part(of).rows
        num_unread = len(self._unread)
        unread: list[int] = []
        found = self._found(current, rows, unread)
        if len(self._unread) > num_unread:
            self._tell_unread(current)
        if self._backlog.is_full():
            self._unavailable("grad/layers", BEHIND)
            return Partials(layout=current, blocks=(), unread=(*unread, *found.rows()))
        blocks, names = self._read(found)
        wish = self._wish(blocks, names, len(current.layers))
        width = len(names) + (0 if wish is None else wire.HISTOGRAM_BINS)
        hold = self._backlog.hold(sum(8 * width * len(rows) for rows, _ in blocks))
        return Partials(
            layout=current,
            blocks=blocks,
            statistics=names,
            unread=tuple(unread),
            holds=(hold,),
            histogram=None if wish is None else self._histogram(found, wish),
        )

    def _histogram(self, found: Found, wish: Wish) -> Histogram | None:
        try:
            return Histogram(wish=wish, parts=((self._backends.histograms(found), None),))
        except RuntimeError as error:
            # No memory for it, or no deterministic way on this device: the statistics must not be lost with it.
            self._unavailable("histogram", f"it could not be taken: {str(error)[:500]}")
            return None

    def _wish(self, blocks: Blocks, names: tuple[str, ...], num_layers: int) -> Wish | None:
        """Why a histogram of these gradients is to be taken; None: it is not."""
        wishes = self._wishes
        if wishes is None:
            return None
        wish = wishes.granted()
        if wishes.at_once and not known_finite(blocks, full=names == wire.STATISTICS):
            wish = wishes.nonfinite()
        if wish is not None and num_layers > MAX_HISTOGRAM_LAYERS:
            self._unavailable("histogram", f"{num_layers} layers; at most {MAX_HISTOGRAM_LAYERS} can be sent")
            return None
        return wish

    def _read(self, found: Found) -> tuple[Blocks, tuple[str, ...]]:
        """Rows of all statistics, or of those of a norm alone, and which they are."""
        if not self._cadence.is_full():
            blocks = self._backends.read(found, full=False)
            if not self._cadence.is_full_too(finite=known_finite(blocks)):
                return blocks, wire.NORM_STATISTICS
        return self._backends.read(found, full=True), wire.STATISTICS

    # Hot path: as `read`. Asks torch for as little as it can of each of perhaps thousands of small gradients.
    def _found(self, current: Layout, rows: Sequence[int], unread: list[int]) -> Found:
        """The gradients of these rows that are there and can be read."""
        found = Found()
        gradients: list[Any] = [current.parameters[row].grad for row in rows]
        if current.is_one_to_one and found.add_alike(rows, gradients):
            return found
        for row, gradient in zip(rows, gradients, strict=True):
            local = gradient
            if gradient is not None and not _is_plain(gradient):
                local = self._local(gradient, row, unread)
            span = current.spans[row]
            local = local if local is None or span is None else local[span]
            # Also a shard of no elements has nothing to say.
            if local is not None and local.numel():
                found.add(row, local)
        return found

    def _local(self, gradient: Any, row: int, unread: list[int]) -> torch.Tensor | None:
        """This rank's part of a gradient; None if it cannot be read."""
        reason = _unreadable(gradient)
        if reason is not None:
            unread.append(row)
            self._unread[row] = reason
            return None
        return layout.local_of(gradient)

    def _tell_unread(self, current: Layout) -> None:
        """Say which layers are not collected and why, and that a norm without them would not be the norm."""
        by_reason: dict[str, list[str]] = {}
        for row, reason in self._unread.items():
            by_reason.setdefault(reason, []).append(current.layers[row].name)
        for reason, names in by_reason.items():
            self._unavailable("grad/layers", f"{_listed(names)} not collected: {reason}")
        count = len(self._unread)
        self._unavailable(
            "grad/norm",
            f"it would lack {count} of {len(current.layers)} layers, whose gradients cannot be read",
        )


class _Part:
    """The rows and parameters of one of several optimizers."""

    __slots__ = ("layout", "owners", "rows", "updated")

    def __init__(self, current: Layout, optimizer: Any) -> None:
        self.updated = tuple(layout.updated_by(optimizer))
        ids = {id(parameter) for parameter in self.updated}
        self.layout = current
        self.rows = [row for row, parameter in enumerate(current.parameters) if id(parameter) in ids]
        self.owners = [owner for owner in current.owners if id(owner) in ids]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more + (" are" if len(names) > 1 else " is")


def _is_plain(gradient: torch.Tensor) -> bool:
    """Whether it is what nearly all gradients are, in a fraction of the time that asking for each exception takes."""
    is_dense = type(gradient) is torch.Tensor and gradient.layout == torch.strided
    return is_dense and gradient.dtype in REAL_DTYPES and not gradient.is_meta


def _unreadable(gradient: Any) -> str | None:
    if layout.is_distributed(gradient):
        if any(layout.is_partial(placement) for placement in gradient.placements):
            return "each rank holds a term of a sum (Partial), so that the gradient is known only after a collective"
        gradient = gradient._local_tensor
    if gradient.is_complex():
        return "gradients of complex parameters have no order, so no minimum and maximum"
    if gradient.layout != torch.strided and not (gradient.is_sparse and gradient.device.type == "cpu"):
        return "a sparse gradient on a device cannot be read without stopping the training loop for it"
    if gradient.is_meta:
        return "the parameters are on the meta device"
    return None
