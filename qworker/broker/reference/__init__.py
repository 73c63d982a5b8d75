"""The reference implementation of the broker contract, on aio-pika's protocol layer."""
