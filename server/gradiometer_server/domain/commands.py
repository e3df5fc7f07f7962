"""What a caller is told of a command that the agents of a run were sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A command on its way.

    Attributes:
        command_id: names it within the run.
        step: the step that it is to be carried out at; None: the next one of each rank.
        ranks: who was asked.
    """

    command_id: str
    step: int | None
    ranks: tuple[int, ...]
