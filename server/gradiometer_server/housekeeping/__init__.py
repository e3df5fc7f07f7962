"""Runs that are changed, thinned or deleted, and the space that this frees."""
