"""Integrations with training frameworks, one module each; importing this package imports none of them.

`gradiometer.integrations.transformers`, `.lightning` and `.accelerate` each import their framework when they are
imported themselves, and say what to install if it is missing.
"""
