"""What tests share: a broker node, waiting by condition, and leak checks."""
