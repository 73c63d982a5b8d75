"""Benchmarks: ``ops/bench NAME`` runs them against a reference, in the same rounds."""
