"""The fleet as people look at it."""
