"""Reads gradients, scalars and activations inside the training process, without a host sync and without a change."""
