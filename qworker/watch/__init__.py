"""What an operator sees of all workers, and tells them: over the broker alone."""
