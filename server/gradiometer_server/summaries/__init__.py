"""How points are packed and summarised, so that no spike is ever hidden. Pure functions of arrays."""
