"""What needs an NVIDIA GPU and TensorRT. Run by ``ops/gpu-acceptance``."""
