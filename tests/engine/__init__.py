"""Tests of the engine backends beyond the contract that they share."""
