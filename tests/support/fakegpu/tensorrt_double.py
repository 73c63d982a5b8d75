"""TensorRT's runtime for tests: the same names, and onnxruntime underneath, on the fake driver's streams and memory.

It is strict where TensorRT is: its memory comes from the device's default pool and goes back with the last
reference, failures are logged and answered with None or False, a context takes only its profile's shapes, and
two executions that use one scratch block at once break the device.
"""

from __future__ import annotations

import ctypes
import enum
import json
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from cuda.bindings import driver

__version__ = "11.4.0.106"

MAGIC = b"ftrt"
Dims = tuple[int, ...]


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class EngineStat(enum.Enum):
    TOTAL_WEIGHTS_SIZE = 0
    STRIPPED_WEIGHTS_SIZE = 1


class Severity(enum.Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    Severity = Severity

    def __init__(self) -> None: ...


class IOutputAllocator:
    def __init__(self) -> None: ...


KINDS = {
    "tensor(float)": (DataType.FLOAT, np.float32),
    "tensor(float16)": (DataType.HALF, np.float16),
    "tensor(int8)": (DataType.INT8, np.int8),
    "tensor(int32)": (DataType.INT32, np.int32),
    "tensor(bool)": (DataType.BOOL, np.bool_),
    "tensor(uint8)": (DataType.UINT8, np.uint8),
    "tensor(int64)": (DataType.INT64, np.int64),
}


class CannotBuild(Exception):
    """What TensorRT's builder would refuse."""


def build(
    onnx: bytes,
    profiles: Sequence[Mapping[str, Sequence[Dims]]] | None = None,
    *,
    dims: Dims = (0, 2, 64),
    scratch: int = 1 << 20,
    weights: int | None = None,
    persistent: int = 64 << 10,
    open_outputs: Sequence[str] = (),
    host_inputs: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ms: float = 0.0,
    version: tuple[int, ...] = (11, 4, 0, 106),
    uncapturable: bool = False,
    fault: str | None = None,
    breaks_on: float | None = None,
) -> bytes:
    """A plan. Without ``profiles`` there is one, with open dims from ``dims``. ``fault``: what fails, by stage.
    ``breaks_on``: a first input with this value in it breaks the device.
    """
    session = _session(onnx)
    for each in (*session.get_inputs(), *session.get_outputs()):
        if each.type not in KINDS:
            raise CannotBuild(f"{each.name} is a {each.type}")
    if profiles is None:
        profiles = [
            {
                each.name: [tuple(d if isinstance(d, int) else size for d in each.shape) for size in dims]
                for each in session.get_inputs()
            }
        ]
    told = {
        "profiles": [{name: [list(s) for s in shapes] for name, shapes in one.items()} for one in profiles],
        "scratch": scratch,
        "weights": len(onnx) if weights is None else weights,
        "persistent": persistent,
        "open": list(open_outputs),
        "host": {name: [list(v) for v in values] for name, values in (host_inputs or {}).items()},
        "ms": ms,
        "uncapturable": uncapturable,
        "fault": fault,
        "breaks_on": breaks_on,
    }
    body = json.dumps(told).encode()
    head = MAGIC + struct.pack("<I", 0) + bytes(16) + bytes(version)
    return head + struct.pack("<I", len(body)) + body + onnx


class Runtime:
    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, plan: Any) -> ICudaEngine | None:
        raw = bytes(plan)
        if raw[:4] != MAGIC:
            return self.complain("Magic tag does not match")
        if tuple(raw[24:28]) != (11, 4, 0, 106):
            found = ".".join(map(str, raw[24:28]))
            return self.complain(
                f"The engine plan file is not compatible with this version of TensorRT, expecting library version "
                f"{__version__} got {found}, please rebuild."
            )
        try:
            (size,) = struct.unpack_from("<I", raw, 28)
            told = json.loads(raw[32 : 32 + size])
            session = _session(raw[32 + size :])
        except (struct.error, ValueError, RuntimeError, ort.capi.onnxruntime_pybind11_state.Fail) as exc:
            return self.complain(f"Serialization assertion failed: {type(exc).__name__}")
        except Exception as exc:  # noqa: BLE001 - each status of the library has a class of its own
            return self.complain(f"Serialization assertion failed: {type(exc).__name__}")
        if told["fault"] == "deserialize":
            return self.complain("deserializeCudaEngine failed: injected")
        memory = _take(told["weights"])
        if memory is None:
            return self.complain(
                "[defaultAllocator.cpp] Requested amount of GPU memory could not be allocated: out of memory"
            )
        return ICudaEngine(self, told, session, memory)

    def complain(self, text: str) -> None:
        self.logger.log(Severity.ERROR, text)


class ICudaEngine:
    def __init__(self, runtime: Runtime, told: dict[str, Any], session: Any, memory: int) -> None:
        self.runtime, self.told, self.session, self._memory = runtime, told, session, memory
        self.shapes: dict[tuple[Dims, ...], list[Dims] | None] = {}
        self.lock = threading.Lock()
        self.inputs = {each.name: each for each in session.get_inputs()}
        self.outputs = {each.name: each for each in session.get_outputs()}
        self.names = [*self.inputs, *self.outputs]

    def __del__(self) -> None:
        _give(self._memory)

    num_io_tensors = property(lambda self: len(self.names))
    device_memory_size_v2 = property(lambda self: self.told["scratch"])
    num_optimization_profiles = property(lambda self: len(self.told["profiles"]))

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return KINDS[(self.inputs.get(name) or self.outputs[name]).type][0]

    def get_tensor_shape(self, name: str) -> Dims:
        shape = (self.inputs.get(name) or self.outputs[name]).shape
        return tuple(d if isinstance(d, int) else -1 for d in shape)

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if name in self.told["host"] else TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        return [tuple(shape) for shape in self.told["profiles"][profile_index][name]]

    def get_tensor_profile_values(self, profile_index: int, name: str) -> list[list[int]]:
        return self.told["host"].get(name, [])

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self.told["scratch"]

    def get_engine_stat(self, stat: EngineStat) -> int:
        return self.told["weights"] if stat is EngineStat.TOTAL_WEIGHTS_SIZE else -1

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> IExecutionContext | None:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        if self.told["fault"] == "context":
            return self.runtime.complain("createExecutionContext failed: injected")
        memory = _take(self.told["persistent"])
        if memory is None:
            return self.runtime.complain("Requested amount of GPU memory could not be allocated: out of memory")
        return IExecutionContext(self, memory)

    def output_shapes(self, feeds: Mapping[str, Any]) -> list[Dims] | None:
        """What these inputs give, by running them once; None when they do not fit together."""
        key = tuple(array.shape for array in feeds.values())
        cached = not self.told["host"]
        with self.lock:
            if not cached or key not in self.shapes:
                try:
                    found: list[Dims] | None = [array.shape for array in self.session.run(None, dict(feeds))]
                except Exception:  # noqa: BLE001
                    found = None
                if not cached:
                    return found
                self.shapes[key] = found
            return self.shapes[key]


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, memory: int) -> None:
        self.engine, self._memory = engine, memory
        self._number = -1
        self._shapes: dict[str, Dims] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self._scratch = (0, 0)
        self._kept: deque[Any] = deque(maxlen=1024)

    def __del__(self) -> None:
        _give(self._memory)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if self.engine.told["fault"] == "profile" or not 0 <= profile_index < self.engine.num_optimization_profiles:
            self._complain(f"profile {profile_index} cannot be set")
            return False
        self._number, self._shapes = profile_index, {}
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0
        self._scratch = (memory, size)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self._number)
        if len(shape) != len(low) or not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
            self._complain(f"IExecutionContext::setInputShape: {name} {tuple(shape)} is out of the profile's range")
            return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self._allocators[name] = allocator
        return True

    def infer_shapes(self) -> list[str]:
        missing = [name for name in self.engine.inputs if name not in self._shapes]
        if not missing and self._output_shapes() is None:
            self._complain("the shapes do not fit together")
            return list(self.engine.inputs)
        return missing

    def get_tensor_shape(self, name: str) -> Dims:
        if name in self._shapes:
            return self._shapes[name]
        found = self._output_shapes()
        if found is None or name in self.engine.told["open"]:
            return tuple(-1 for _ in self.engine.get_tensor_shape(name))
        return found[list(self.engine.outputs).index(name)]

    def get_max_output_size(self, name: str) -> int:
        told = self.engine.told
        if name in told["open"] or told["host"]:
            return -1
        largest = {n: np.ones(told["profiles"][self._number][n][2], _dtype(e)) for n, e in self.engine.inputs.items()}
        found = self.engine.output_shapes(largest)
        if found is None:
            return -1
        shape = found[list(self.engine.outputs).index(name)]
        return math.prod(shape) * np.dtype(_dtype(self.engine.outputs[name])).itemsize

    def execute_async_v3(self, stream_handle: int) -> bool:
        told = self.engine.told
        if told["fault"] == "enqueue":
            self._complain("enqueueV3 failed: injected")
            return False
        grows = {name for name in self.engine.outputs if name in self._allocators}
        unset = [n for n in self.engine.names if n not in self._addresses and n not in grows]
        if unset or self._scratch[1] < told["scratch"]:
            self._complain(f"no address is set for {unset or 'the scratch memory'}")
            return False
        _, status = driver.cuStreamIsCapturing(stream_handle)
        capturing = status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        if capturing and (told["uncapturable"] or grows):
            self._complain("a synchronisation is not allowed while a stream is captured")
            return False
        if grows:
            return self._execute_growing(stream_handle, grows)
        return self._push(stream_handle, dict(self._addresses), None)

    # --- inside ---

    def _output_shapes(self) -> list[Dims] | None:
        if len(self._shapes) < len(self.engine.inputs):
            return None
        host = self.engine.told["host"]
        feeds = {
            name: _view(self._addresses[name], self._shapes[name], _dtype(each)).copy()
            if name in host
            else np.ones(self._shapes[name], _dtype(each))
            for name, each in self.engine.inputs.items()
        }
        return self.engine.output_shapes(feeds)

    def _execute_growing(self, stream: int, grows: set[str]) -> bool:
        """Sizes depend on values: wait for the inputs, run, ask for memory, and copy there."""
        driver.cuStreamSynchronize(stream)
        results = dict(zip(self.engine.outputs, self._run(self._addresses), strict=True))
        addresses = dict(self._addresses)
        for name in grows:
            memory = self._allocators[name].reallocate_output_async(name, 0, results[name].nbytes, 256, stream)
            if not memory:
                self._complain(f"output {name}: out of memory")
                return False
            addresses[name] = memory
            self._allocators[name].notify_shape(name, results[name].shape)
        return self._push(stream, addresses, results)

    def _run(self, addresses: Mapping[str, int]) -> list[Any]:
        feeds = {n: _view(addresses[n], self._shapes[n], _dtype(e)).copy() for n, e in self.engine.inputs.items()}
        return self.engine.session.run(None, feeds)

    def _push(self, stream: int, addresses: dict[str, int], results: dict[str, Any] | None) -> bool:
        # nothing below may know of this object: it would live until the garbage collector comes
        session, told, scratch = self.engine.session, self.engine.told, self._scratch
        inputs = {n: (self._shapes[n], _dtype(e)) for n, e in self.engine.inputs.items()}
        outputs = list(self.engine.outputs)

        def kernel(_: Any) -> None:
            token = np.frombuffer(np.random.default_rng().bytes(64), np.uint8)
            mark = _view(scratch[0], (64,), np.uint8) if scratch[1] >= 64 else None
            try:
                if mark is not None:
                    mark[:] = token
                if told["ms"]:
                    time.sleep(told["ms"] / 1000)
                if results is None:
                    feeds = {n: _view(addresses[n], shape, dtype) for n, (shape, dtype) in inputs.items()}
                    if told["breaks_on"] is not None and np.any(next(iter(feeds.values())) == told["breaks_on"]):
                        fake().fakegpu_break(700)
                    made = dict(zip(outputs, session.run(None, feeds), strict=True))
                else:
                    made = results
                for name, array in made.items():
                    whole = np.ascontiguousarray(array)
                    ctypes.memmove(addresses[name], whole.ctypes.data, whole.nbytes)
                if mark is not None and not np.array_equal(mark, token):
                    fake().fakegpu_break(700)
            except Exception:  # noqa: BLE001 - a kernel that fails breaks the context
                fake().fakegpu_break(719)

        callback = _Callback(kernel)
        self._kept.append(callback)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        (status,) = driver.cuLaunchHostFunc(stream, driver.CUhostFn(address), 0)
        return status == driver.CUresult.CUDA_SUCCESS

    def _complain(self, text: str) -> None:
        self.engine.runtime.complain(text)


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def fake() -> Any:
    """The fake driver's own functions; it is in the process already, under this name."""
    return ctypes.CDLL("libcuda.so.1")


def _session(onnx: bytes) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])


def _dtype(each: Any) -> Any:
    return KINDS[each.type][1]


def _view(address: int, shape: Sequence[int], dtype: Any) -> Any:
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if not nbytes:
        return np.zeros(shape, dtype)
    return np.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype).reshape(shape)


def _take(nbytes: int) -> int | None:
    status, memory = driver.cuMemAllocAsync(max(nbytes, 1), 0)
    return int(memory) if status == driver.CUresult.CUDA_SUCCESS else None


def _give(memory: int) -> None:
    driver.cuMemFreeAsync(memory, 0)
    driver.cuStreamSynchronize(0)
