"""What ``import tensorrt`` finds in the child processes of the tests: the double."""

from tests.support.fakegpu.tensorrt_double import *  # noqa: F403
from tests.support.fakegpu.tensorrt_double import __version__  # noqa: F401
