"""Measuring: what `gradsync bench` and benchmarks/ have in common."""
