"""Offline scoring: a file or a stream of rows in, results out, by the batch lane."""
