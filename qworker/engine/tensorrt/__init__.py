"""TensorRT engines on one GPU: ``backend`` makes them, the other modules are its parts.

``gpu`` and ``library`` are the only modules that load CUDA and TensorRT, in this order and when they are
asked to: everything else runs without either.
"""
