"""`gradiometer lint`: what the alert rules say of training logs that were written by other tools.

The rows of a file become the items that the fold hands on in a live run, and go through the same engine.
"""
