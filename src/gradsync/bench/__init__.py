"""The measurements of `gradsync bench`; the programs in benchmarks/ use the same functions."""
