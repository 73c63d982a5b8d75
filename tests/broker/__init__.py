"""Tests of the fast data plane's parts; the whole is tested by ``tests/contract``."""
