"""What the routes that change or delete a run take and answer."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gradiometer_server.domain.jsonable import NAN, NEG_INF, POS_INF
from gradiometer_server.store.edits import RunEdit

_FLOATS = {NAN: float("nan"), POS_INF: float("inf"), NEG_INF: float("-inf")}


class RunPatch(BaseModel):
    """Changes to a run; what is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")
    name: str | None = Field(default=None, description="one printable line of at most 500 characters")
    tags: list[str] | None = Field(default=None, description="all tags, in place of those that are there")
    notes: str | None = Field(default=None, description="at most 65,536 characters")
    group: str | None = Field(default=None, description="null or empty: in no group")
    config: dict[str, Any] | None = Field(
        default=None,
        description="merged into the config by key at the top level. NaN, Infinity and -Infinity may be bare words, as "
        "Python writes them, or the strings that this API answers with",
    )
    remove_config_keys: list[str] = Field(default=[], description="keys at the top level of the config")

    @model_validator(mode="after")
    def _says_something(self) -> RunPatch:
        if not self.model_fields_set:
            raise ValueError(
                "nothing is to be changed; give name, tags, notes, group, config or remove_config_keys"
            )
        return self

    def edit(self) -> RunEdit:
        """As the store takes it."""
        group = self.group or "" if "group" in self.model_fields_set else None
        return RunEdit(
            name=self.name,
            tags=self.tags,
            notes=self.notes,
            group=group,
            config=None
            if self.config is None
            else {key: _floats(value) for key, value in self.config.items()},
            removed_config=self.remove_config_keys,
        )


def _floats(value: Any) -> Any:
    """The inverse of `jsonable.json_safe`."""
    if isinstance(value, str):
        return _FLOATS.get(value, value)
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return value


class RunDeleted(BaseModel):
    """A run that is gone from every list; what it occupied is freed in the background."""

    model_config = ConfigDict(extra="forbid")
    id: str
    deleted_s: float = Field(
        description="Unix seconds; launches of the run before it are refused, later ones begin it anew"
    )
