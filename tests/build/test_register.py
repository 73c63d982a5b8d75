"""Registration: a model is loaded and measured in a process of its own, then published or refused."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import TensorProto

from qworker.build.register import register
from qworker.engine.base import ModelSource
from qworker.engine.onnx import OnnxBackend
from qworker.engine.warmup import read_sample
from qworker.errors import InvalidInput, ModelRefused, StoreError
from qworker.store.local import LocalStore
from qworker.wire.datatypes import tensor
from tests.support import models
from tests.support.waiting import wait_until_sync


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def put(tmp_path: Path) -> Path:
    """A folder for model files."""
    folder = tmp_path / "in"
    folder.mkdir()
    return folder


def onnx_file(folder: Path, content: bytes, name: str = "model.onnx") -> Path:
    """Write a model's bytes."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# --- what is recorded ---------------------------------------------------------------------------


def test_a_registered_model_can_be_fetched_and_run(store: LocalStore, put: Path) -> None:
    """The card says what a worker needs to know, and the bytes are the file's."""
    path = onnx_file(put, models.arithmetic())
    card = register(store, path, "org/calc")
    assert (card.model, card.version, card.backend, card.warmed) == ("org/calc", "1", "onnx", True)
    assert card.runtime.startswith("onnxruntime ")
    assert [spec.name for spec in card.signature().outputs] == ["sum:0", "difference", "7"]
    fetched = store.fetch(store.card("org/calc"))
    assert fetched.content == path.read_bytes()
    backend = OnnxBackend()
    engine = backend.load(ModelSource("org/calc", "1", fetched.path, fetched.content))
    assert fetched.sample is not None
    assert backend.warm_up(engine, read_sample(fetched.sample))
    engine.close()


def test_scalars_are_told_from_unknown_ranks(store: LocalStore, put: Path) -> None:
    """onnxruntime shows both with an empty shape; the card has () for one and None for the other."""
    assert register(store, onnx_file(put, models.scaled()), "s").inputs[1].shape == ()
    rankless = register(store, onnx_file(put, models.identity(shape=None)), "r")
    assert rankless.inputs[0].shape is None
    assert rankless.outputs[0].shape is None


def test_memory_is_measured_and_not_guessed_from_the_file(store: LocalStore, put: Path) -> None:
    """A model with 20 MiB of weights takes about that; loading it takes more for a moment."""
    card = register(store, onnx_file(put, models.heavy(20)), "heavy")
    assert 19 << 20 < card.resident_bytes < 30 << 20
    assert card.peak_bytes is not None
    assert card.peak_bytes > card.resident_bytes + (15 << 20)
    assert 0 < card.load_seconds < 10
    tiny = register(store, onnx_file(put, models.identity()), "tiny")
    assert tiny.resident_bytes < 3 << 20


def test_memory_of_intermediate_results_counts(store: LocalStore, put: Path) -> None:
    """What a run of the sample takes is in the figure that the ledger books."""
    path, small, large = onnx_file(put, models.outer()), put / "small.npz", put / "large.npz"
    np.savez(small, x=np.ones(8, np.float32))
    np.savez(large, x=np.ones(2048, np.float32))
    few = register(store, path, "few", sample=small).resident_bytes
    many = register(store, path, "many", sample=large).resident_bytes
    assert many - few > 14 << 20  # 2048 x 2048 floats are 16 MiB


def test_external_weights_come_along(store: LocalStore, put: Path) -> None:
    """Weights in a file of an odd name are found, copied, digested and loaded."""
    models.with_external_weights(put / "ext")
    card = register(store, put / "ext")
    assert card.model == "ext"
    assert [file.name for file in card.files] == ["model.onnx", "onnx::MatMul_12", "warmup.npz"]
    fetched = store.fetch(card)
    assert fetched.content is None
    engine = OnnxBackend().load(ModelSource("ext", "1", fetched.path, None))
    assert engine.run([tensor("x", np.ones((1, 64), np.float32))])[0].array.sum() == 128


# --- names and versions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("model.onnx", "in"),
        ("résumé scorer v2.onnx", "r-sum-scorer-v2"),
        ("_hidden.onnx", "hidden"),
        ("magika.v3.onnx", "magika.v3"),
    ],
)
def test_ids_are_made_of_names(store: LocalStore, put: Path, name: str, model: str) -> None:
    """Of the file's name, or of the folder's when the file is just called model."""
    assert register(store, onnx_file(put, models.identity(), name)).model == model


def test_an_id_that_cannot_be_made_is_asked_for(store: LocalStore, put: Path) -> None:
    """The message names --id."""
    with pytest.raises(InvalidInput, match="--id"):
        register(store, onnx_file(put, models.identity(), "模型.onnx"))
    for wrong in ("../x", "a b", "", "a//b"):
        with pytest.raises(InvalidInput):
            register(store, onnx_file(put, models.identity()), wrong)
    with pytest.raises(InvalidInput):
        register(store, onnx_file(put, models.identity()), "m", "1/2")
    assert not store.root.exists()


def test_the_same_model_again_changes_nothing(store: LocalStore, put: Path) -> None:
    """It is said, and not even probed; other bytes make the next version."""
    lines: list[str] = []
    path = onnx_file(put, models.identity())
    first = register(store, path, "m", say=lines.append)
    assert len(lines) == 1
    assert register(store, path, "m", say=lines.append) == first
    assert register(store, path, "m", "1", say=lines.append) == first
    assert [line for line in lines[1:] if "nothing changed" in line] == lines[1:]
    onnx_file(put, models.arithmetic())
    assert register(store, path, "m").version == "2"
    with pytest.raises(StoreError, match="registered already"):
        register(store, path, "m", "1")


def test_two_register_one_version_at_once(store: LocalStore, put: Path) -> None:
    """Different models: one wins. The same model: both have it."""
    paths = [onnx_file(put, models.identity(), "a.onnx"), onnx_file(put, models.scaled(), "b.onnx")]

    def attempt(path: Path) -> str:
        try:
            return register(store, path, "m", "1").version
        except StoreError as exc:
            return "lost" if "registered already" in str(exc) else str(exc)

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(attempt, paths)) == ["1", "lost"]
        assert [card.version for card in threads.map(lambda path: register(store, path, "n"), [paths[0]] * 2)] in (
            ["1", "1"],
            ["1", "2"],
            ["2", "1"],
        )


# --- samples ------------------------------------------------------------------------------------


def test_a_sample_is_used_and_kept(store: LocalStore, put: Path) -> None:
    """A model that no guess suits is warmed up on its sample, which lies in its folder or is named."""
    onnx_file(put, models.picky(57), "ocr/model.onnx")
    assert register(store, put / "ocr", "without").warmed is False
    np.savez(put / "ocr/sample.npz", x=np.ones((1, 57), np.float32))
    card = register(store, put / "ocr")
    assert (card.warmed, card.sample) == (True, "sample.npz")
    fetched = store.fetch(card)
    assert fetched.content is not None
    assert fetched.sample is not None
    assert read_sample(fetched.sample)["x"].shape == (1, 57)


def test_a_sample_may_hold_text_and_names_with_slashes(store: LocalStore, put: Path) -> None:
    """numpy's own text arrays, and "_" for the "/" that an .npz cannot hold."""
    np.savez(put / "words.npz", words=np.array(["hund", "Flöße"]))
    assert register(store, onnx_file(put, models.labels()), "l", sample=put / "words.npz").warmed
    np.savez(put / "two.npz", **{"in_a:0": np.ones((1, 2), np.float32), "b": np.ones((1, 2), np.float32)})
    assert register(store, onnx_file(put, models.arithmetic()), "a", sample=put / "two.npz").warmed


def test_a_sample_that_does_not_suit_is_refused(store: LocalStore, put: Path) -> None:
    """The message says how it differs."""
    path, sample = onnx_file(put, models.fixed_batch()), put / "sample.npz"
    cases = [
        ({"x": np.ones((2, 2), np.float32)}, "x"),
        ({"y": np.ones((3, 2), np.float32)}, "missing: x; unknown: y"),
        ({"x": np.array([[object()]])}, "numpy"),
    ]
    for arrays, reason in cases:
        np.savez(sample, **arrays)
        with pytest.raises(ModelRefused, match=f"sample.*{reason}"):
            register(store, path, "m", sample=sample)
    sample.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(ModelRefused, match="sample"):
        register(store, path, "m", sample=sample)
    with pytest.raises(ModelRefused, match="does not exist"):
        register(store, path, "m", sample=put / "nowhere.npz")
    assert store.models() == []


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "git lfs pull"),
        (b"PK\x03\x04rest of an archive", "zip"),
        (b"\x93NUMPY" * 50, "is not an ONNX model"),
        (models.heavy(1)[: 1 << 19], "cut off"),
        (models.identity()[:10], "not an ONNX model"),
        (models.missing_op(), "Levitate"),
        (models.sequence_output(), "output 'parts' is a seq"),
        (models.identity(TensorProto.BFLOAT16), "bfloat16"),
        (models.identity(TensorProto.FLOAT8E4M3FN), "float8"),
    ],
    ids=["empty", "html", "lfs", "zip", "numpy", "truncated", "very short", "op", "sequence", "bf16", "float8"],
)
def test_bad_models_are_refused_with_the_reason(store: LocalStore, put: Path, content: bytes, reason: str) -> None:
    """ModelRefused, and nothing of it is left in the store."""
    with pytest.raises(ModelRefused, match=reason):
        register(store, onnx_file(put, content), "m")
    assert not store.root.exists() or (store.models(), list(store.incoming.iterdir())) == ([], [])


@pytest.mark.parametrize("location", ["../weights", "/etc/passwd", "deep/weights", ""])
def test_weights_elsewhere_are_refused(store: LocalStore, put: Path, location: str) -> None:
    """External weights must lie beside the model; the message says how to get there."""
    models.with_external_weights(put / "ext", "w")
    content = (put / "ext/model.onnx").read_bytes()
    path = onnx_file(put / "ext", models.relocated(content, location))
    with pytest.raises(ModelRefused, match="all_tensors_to_one_file"):
        register(store, path)


def test_missing_or_damaged_weights_are_refused(store: LocalStore, put: Path) -> None:
    """The file is named when it is missing; when it is short the library says so."""
    models.with_external_weights(put / "ext", "w")
    (put / "ext/w").write_bytes(b"short")
    with pytest.raises(ModelRefused, match="does not load"):
        register(store, put / "ext")
    (put / "ext/w").unlink()
    with pytest.raises(ModelRefused, match="'w', which does not lie beside"):
        register(store, put / "ext")
    assert store.models() == []


def test_paths_that_hold_no_model_are_refused(store: LocalStore, put: Path) -> None:
    """A path that is not there, an empty folder, and a folder with another file."""
    with pytest.raises(ModelRefused, match="does not exist"):
        register(store, put / "nowhere")
    with pytest.raises(ModelRefused, match=r"no \.onnx file"):
        register(store, put)
    onnx_file(put, models.identity(), "a.onnx")
    with pytest.raises(ModelRefused, match=r"found a\.onnx"):
        register(store, put)


def test_a_model_that_never_ends_is_refused_in_time(store: LocalStore, put: Path) -> None:
    """The child is ended with it."""
    with pytest.raises(ModelRefused, match="within 4 s"):
        register(store, onnx_file(put, models.endless()), "m", timeout=4)
    assert probes() == []
    assert store.models() == []
    assert register(store, onnx_file(put, models.identity()), "m").version == "1"  # and nothing is harmed


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGKILL, "memory")])
def test_a_probe_that_is_killed_harms_nobody(store: LocalStore, put: Path, number: signal.Signals, reason: str) -> None:
    """A crash of the library, or the system's out-of-memory killer, ends the child alone."""
    path = onnx_file(put, models.endless())
    with ThreadPoolExecutor(1) as threads:
        registering = threads.submit(register, store, path, "m", timeout=60)
        [child] = wait_until_sync(lambda: [child for child in probes() if child.cpu_times().user > 1], 60)
        child.send_signal(number)
        with pytest.raises(ModelRefused, match=reason):
            registering.result(60)
    assert list(store.incoming.iterdir()) == []


def probes() -> list[psutil.Process]:
    """Child processes of this one that probe a model."""
    return [child for child in psutil.Process().children() if "qworker.build.probe" in child.cmdline()]
