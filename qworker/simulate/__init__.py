"""Replays a trace of requests through the policy code that the worker runs, on a virtual clock."""
