"""The data plane of our own: AMQP frames parsed in place (``frames``, no I/O) over one protocol each (``link``)."""
