"""Bucketing: from single gradients to flat buffers, and back."""
