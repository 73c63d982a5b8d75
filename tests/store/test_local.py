"""The local store: names, versions, what is read is what was published."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qworker.errors import CorruptModel, ModelNotFound, QworkerError, StoreError
from qworker.store.local import MAX_CARD_BYTES, LocalStore
from tests.store.publishing import publish

PART = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
MODEL_IDS = st.lists(PART, min_size=1, max_size=4).map("/".join)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store whose folder is not there yet."""
    return LocalStore(tmp_path / "store")


def files_below(folder: Path) -> set[Path]:
    """Everything below a folder."""
    return set(folder.rglob("*"))


# --- publishing and reading ---------------------------------------------------------------------


def test_what_is_published_can_be_fetched(store: LocalStore) -> None:
    """Bytes, card and sample come back, and nothing is left of the publish."""
    card = publish(store, "org/model", content=b"abc" * 1000, more={"sample.npz": b"s"}, sample="sample.npz").card
    fetched = store.fetch(store.card("org/model"))
    assert fetched.card == card
    assert fetched.content == b"abc" * 1000 == fetched.path.read_bytes()
    assert fetched.sample is not None
    assert fetched.sample.read_bytes() == b"s"
    assert list(store.incoming.iterdir()) == []


def test_external_weights_lie_beside_the_path(store: LocalStore) -> None:
    """A model with weights of its own file is loaded from its path: no content comes."""
    publish(store, "m", more={"onnx::MatMul_1": b"w"})
    fetched = store.fetch(store.card("m"))
    assert fetched.content is None
    assert (fetched.path.parent / "onnx::MatMul_1").read_bytes() == b"w"


def test_a_published_version_is_readable_by_other_users(store: LocalStore) -> None:
    """Workers often run as another user than the one who registers."""
    publish(store, "m")
    for path in (store.root / "models").rglob("*"):
        assert path.stat().st_mode & 0o044 == 0o044, path


def test_versions_count_up_and_the_last_registered_is_the_default(store: LocalStore) -> None:
    """Whatever the versions are called."""
    assert [publish(store, "m", content=bytes([n])).card.version for n in range(11)] == [str(n + 1) for n in range(11)]
    publish(store, "m", "0.9-fix", content=b"new")
    assert store.versions("m") == [str(n + 1) for n in range(11)] + ["0.9-fix"]
    assert store.card("m").version == "0.9-fix"
    assert publish(store, "m", content=b"x").card.version == "12"


def test_the_last_registered_is_the_default_over_a_clock_that_runs_ahead(store: LocalStore) -> None:
    """A version from a machine with a wrong clock does not stay the default."""
    publish(store, "m", "1")
    path = store.root / "models/m/1/card.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"created": "2099-01-01T00:00:00Z"}))
    publish(store, "m", "2", content=b"new")
    assert store.card("m").version == "2"


def test_the_same_bytes_again_change_nothing(store: LocalStore) -> None:
    """The same version with the same files is left alone, with other files it is refused."""
    first = publish(store, "m", "v1")
    again = publish(store, "m", "v1")
    assert (first.fresh, again.fresh) == (True, False)
    assert again.card == first.card
    with pytest.raises(StoreError, match=r"registered already.*--version"):
        publish(store, "m", "v1", content=b"other")
    assert store.fetch(store.card("m")).content == b"weights"
    assert list(store.incoming.iterdir()) == []


def test_two_that_publish_one_version_at_once(store: LocalStore) -> None:
    """One wins, the other is told; what is there is whole."""
    for round_number in range(10):
        barrier = Barrier(2)

        def attempt(content: bytes, version: str = f"v{round_number}", barrier: Barrier = barrier) -> str:
            barrier.wait(10)
            try:
                return "won" if publish(store, "m", version, content=content).fresh else "same"
            except StoreError as exc:
                return "lost" if "registered already" in str(exc) else str(exc)

        with ThreadPoolExecutor(2) as threads:
            assert sorted(threads.map(attempt, [b"a", b"b"])) == ["lost", "won"]
        assert store.fetch(store.card("m", f"v{round_number}")).content in {b"a", b"b"}


def test_many_that_publish_the_next_version_at_once(store: LocalStore) -> None:
    """Each gets a number of its own."""
    with ThreadPoolExecutor(4) as threads:
        cards = list(threads.map(lambda n: publish(store, "m", content=bytes([n])).card, range(8)))
    assert sorted(int(card.version) for card in cards) == list(range(1, 9))
    assert all(store.fetch(card).content for card in cards)


# --- removing -----------------------------------------------------------------------------------


def test_remove_one_version_and_then_all(store: LocalStore) -> None:
    """What is removed is gone, and no folder is left of a model without versions."""
    for n in range(3):
        publish(store, "org/m", content=bytes([n]))
    card = store.card("org/m")
    assert store.remove("org/m", "3") == ["3"]
    assert store.card("org/m").version == "2"
    with pytest.raises(ModelNotFound):
        store.fetch(card)
    assert store.remove("org/m") == ["1", "2"]
    assert store.models() == []
    assert {path.name for path in files_below(store.root)} == {"models", "incoming"}
    with pytest.raises(ModelNotFound, match="no model"):
        store.card("org/m")


def test_a_replaced_version_is_not_called_corrupt(store: LocalStore) -> None:
    """A card that was read before its version was replaced: read it again, nothing is damaged."""
    card = publish(store, "m", "1").card
    store.remove("m")
    publish(store, "m", "1", content=b"other bytes")
    with pytest.raises(ModelNotFound, match="replaced"):
        store.fetch(card)


def test_removing_what_is_not_there(store: LocalStore) -> None:
    """Says so, and touches nothing."""
    publish(store, "m")
    for model, version in (("n", None), ("m", "2"), ("m", "../1"), ("../models/m", None)):
        with pytest.raises(ModelNotFound):
            store.remove(model, version)
    assert store.versions("m") == ["1"]


# --- names --------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.sets(MODEL_IDS, min_size=1, max_size=4))
def test_any_set_of_ids_comes_back(ids: set[str]) -> None:
    """No two ids meet in one folder, also "a/1" beside version 1 of "a"."""
    with TemporaryDirectory() as folder:
        store = LocalStore(Path(folder) / "store")
        for model in ids:
            publish(store, model, content=model.encode())
        assert store.models() == sorted(ids)
        assert {store.fetch(store.card(model)).content for model in ids} == {model.encode() for model in ids}


def test_an_id_that_looks_like_another_ones_version(store: LocalStore) -> None:
    """The model "a/1" and version 1 of "a" live side by side, and so do their files' names."""
    for model in ("a", "a/1", "a/1/model.onnx", "incoming", "models"):
        publish(store, model, content=model.encode())
    store.remove("a")
    assert store.models() == sorted(["a/1", "a/1/model.onnx", "incoming", "models"])
    assert store.fetch(store.card("a/1")).content == b"a/1"


@settings(max_examples=200, deadline=None)
@given(name=st.text(max_size=30) | st.sampled_from(["..", "../store", "/etc", "a/../../x", "a//b", "", "a\0b", "a~b"]))
def test_strange_names_are_just_not_found(name: str) -> None:
    """Whatever is asked for, the answer is ours and nothing outside the store is looked at or written."""
    with TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        (root / "models").mkdir(parents=True)
        before = files_below(Path(folder))
        store = LocalStore(root)
        for ask in (store.card, store.versions, store.remove):
            with pytest.raises(ModelNotFound):
                ask(name)
        assert files_below(Path(folder)) == before


@pytest.mark.parametrize("name", ["..", "../../x", "a/../b", "/abs", "a~b", ".hidden", "a b", "x" * 201])
def test_names_that_are_none_are_not_published(store: LocalStore, name: str) -> None:
    """Neither as an id nor as a version."""
    for model, version in ((name, "1"), ("m", name)):
        with pytest.raises(QworkerError):
            publish(store, model, version)
    assert store.models() == []
    assert [path.name for path in store.root.parent.iterdir()] == ["store"]


# --- damage -------------------------------------------------------------------------------------


def damaged(position: float) -> Any:
    """Flip a bit at a place of the file."""

    def damage(path: Path) -> None:
        body = bytearray(path.read_bytes())
        body[int(len(body) * position)] ^= 0x10
        path.write_bytes(body)

    return damage


def outward_link(path: Path) -> None:
    """Replace the file by a link to the same bytes outside the store."""
    outside = path.parents[4] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def pipe(path: Path) -> None:
    """Replace the file by a pipe, which a reader would wait on for ever."""
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Any] = {
    "flipped at 1 %": damaged(0.01),
    "flipped at 50 %": damaged(0.5),
    "flipped at 99 %": damaged(0.99),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "a web page": lambda path: path.write_text("<!DOCTYPE html><html><body>Sign in</body></html>"),
    "missing": lambda path: path.unlink(),
    "a link out of the store": outward_link,
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "a pipe": pipe,
}


@pytest.mark.parametrize("file", ["model.onnx", "weights.bin", "sample.npz"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_not_handed_over(store: LocalStore, file: str, damage: str) -> None:
    """CorruptModel names the file and what to do; other models are not harmed."""
    bodies = {"weights.bin": bytes(range(256)) * 40, "sample.npz": b"sample" * 100}
    publish(store, "m", content=b"content" * 999, more=bodies, sample="sample.npz")
    publish(store, "other")
    DAMAGE[damage](store.root / "models/m/1" / file)
    with pytest.raises(CorruptModel, match=rf"{file}.*models remove m --version 1|{file}.*(remove|register)"):
        store.fetch(store.card("m"))
    assert store.fetch(store.card("other")).content == b"weights"


CARD_DAMAGE: dict[str, Any] = {
    name: damage for name, damage in DAMAGE.items() if name not in {"missing", "longer"} and "flipped" not in name
} | {
    "longer than any card": lambda path: path.write_bytes(b" " * (MAX_CARD_BYTES + 1)),
    "not text": lambda path: path.write_bytes(b"\xff\xfe" * 100),
    "a list": lambda path: path.write_text("[1]"),
    "nested deep": lambda path: path.write_text("[" * 100_000),
    "another format": lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 2')),
    "another model's": lambda path: path.write_text(path.read_text().replace('"model": "m"', '"model": "n"')),
    "a file outside": lambda path: path.write_text(path.read_text().replace('"model.onnx"', '"../../x"')),
    "no files": lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"files": []})),
}


@pytest.mark.parametrize("damage", CARD_DAMAGE)
def test_a_damaged_card_is_said_to_be_one(store: LocalStore, damage: str) -> None:
    """CorruptModel names the card; the model stays listed, keeps its place, and can be removed."""
    publish(store, "m", content=b"old")
    publish(store, "other")
    CARD_DAMAGE[damage](store.root / "models/m/1/card.json")
    with pytest.raises(CorruptModel, match=r"card\.json.*register"):
        store.card("m")
    assert store.models() == ["m", "other"]
    publish(store, "m", content=b"new")
    assert store.versions("m") == ["1", "2"]
    assert store.fetch(store.card("m")).content == b"new"
    assert store.remove("m", "1") == ["1"]
    assert store.versions("m") == ["2"]


def test_what_has_no_card_does_not_exist(store: LocalStore) -> None:
    """Files without a card are not listed and not in the way of other versions; they can be removed."""
    publish(store, "m")
    (store.root / "models/m/2").mkdir()
    (store.root / "models/m/2/model.onnx").write_bytes(b"half a copy")
    (store.root / "models/half/1").mkdir(parents=True)
    (store.root / "models/lost+found").mkdir()
    (store.root / "models/a file").write_bytes(b"")
    assert store.models() == ["m"]
    assert store.versions("m") == ["1"]
    assert publish(store, "m", content=b"3").card.version == "3"
    with pytest.raises(StoreError, match="without a card"):
        publish(store, "m", "2")
    assert store.remove("m", "2") == ["2"]


def test_a_model_folder_that_leads_out_is_not_written(store: LocalStore, tmp_path: Path) -> None:
    """A link in place of a model's folder is refused, and nothing is written where it leads."""
    (store.root / "models").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (store.root / "models/m").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="link"):
        publish(store, "m")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_store_that_is_not_there(store: LocalStore) -> None:
    """Reading says so; an empty folder is an empty store."""
    for ask in (store.models, lambda: store.card("m"), lambda: store.versions("m")):
        with pytest.raises(StoreError, match="does not exist"):
            ask()
    store.root.mkdir()
    assert store.models() == []
    LocalStore(store.root / "file").root.write_bytes(b"")
    with pytest.raises(StoreError, match="not a folder"):
        LocalStore(store.root / "file").models()
    with pytest.raises(StoreError, match="folder"):
        publish(LocalStore(store.root / "file"), "m")
