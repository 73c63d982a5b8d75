"""``qworker build``: from an ONNX file to a TensorRT plan in the store, with its card.

Register, convert, gate, build, measure, publish; the card last. On a machine without a GPU a build for
TensorRT stops before the builder, and says where to go on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from qworker.build.calibrate_rows import Rows, fixed_rows, read_rows
from qworker.build.convert import check_takeable, inputs_of, read_model, release_names, source_digest, write_model
from qworker.build.gate import INT8_TOP1_DROP, check, gate_words
from qworker.build.plan_convert import Converted, Recipe, convert
from qworker.build.profiles import Profile, parse_profiles, settle_profiles
from qworker.build.register import register
from qworker.build.tensorrt import Target, Toolkit, Watch, toolkit
from qworker.build.tensorrt_build import BuilderOptions, BuiltPlan, build_plan
from qworker.build.tensorrt_device import Measured, find_device, measure
from qworker.engine.warmup import read_sample
from qworker.errors import InvalidInput, ModelRefused
from qworker.policy.plan_choice import DeviceFacts
from qworker.store.card import Card, GateEntry, Option, Plan, RangeEntry, RunTime
from qworker.store.local import LocalStore
from qworker.store.plans import plan_cards, plan_name, publish_plan
from qworker.wire.datatypes import itemsize
from qworker.wire.signature import TensorSpec


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to build. ``max_top1_drop`` None: 1 % for INT8, and anything finite for FP16."""

    path: Path
    model: str | None = None
    version: str | None = None
    target: Target = "trt"
    recipe: Recipe = field(default_factory=lambda: Recipe("fp16"))
    profiles: tuple[str, ...] = ()
    calibration: Path | None = None
    sample: Path | None = None
    max_top1_drop: float | None = None
    builder: BuilderOptions = field(default_factory=BuilderOptions)
    device: int = 0
    again: bool = False
    """Build also what the store has already, made of the same source in the same way."""


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """``card`` of the plan, or ``left``: what remains to be done, and where."""

    model: str
    version: str
    card: Card | None
    gate: GateEntry | None
    note: str
    converted: Path
    reused: bool = False
    left: str | None = None


class Teller(Protocol):
    """Hears how far a build is."""

    def say(self, line: str) -> None: ...
    def stage(self, name: str, done: int, total: int) -> None: ...
    @property
    def watch(self) -> Watch: ...


def build(store: LocalStore, request: PlanRequest, teller: Teller) -> PlanOutcome:
    """Build one plan and put it beside its model's version; the model is registered first where it is not.

    Raises ModelRefused with the reason (TensorRT cannot take it, the gate, no library), InvalidInput for
    options that do not fit the model, StoreError, KeyboardInterrupt when it was cancelled.
    """
    kit = toolkit("rtx") if request.target == "rtx" else None
    if kit is not None and request.builder.version_compatible:
        raise InvalidInput("TensorRT-RTX here builds no version-compatible plans: leave --version-compatible out")
    source = register(store, request.path, request.model, request.version, request.sample, say=teller.say)
    folder = store.version_folder(source.model, source.version)
    work = _prepare(request, source, folder / source.files[0].name, teller)
    converted = _converted(request, work, folder, teller)
    device: DeviceFacts | None = None
    if kit is None:
        try:
            device = find_device(request.device)  # before anything of TensorRT exists
            kit = toolkit("trt")
        except ModelRefused as exc:
            return _stopped(work, converted, str(exc))
    there = None if request.again else _already(store, request, work, kit, device)
    if there is not None:
        teller.say(f"{there.files[0].name} is there already, made of the same model in the same way")
        return _outcome(work, converted, there, reused=True)
    card = _build(store, request, work, converted, kit, device, teller)
    return _outcome(work, converted, card, reused=False)


# --- before the builder -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    """What is known before anything is converted."""

    source: Card
    onnx: Path
    digest: str
    rows: Rows | None
    profiles: tuple[Profile, ...]
    drop: float | None


def _prepare(request: PlanRequest, source: Card, path: Path, teller: Teller) -> _Work:
    model = read_model(path)
    check_takeable(model)
    inputs = inputs_of(model)
    del model
    rows = _rows(request, source, path, inputs)
    given = parse_profiles(request.profiles)
    axes = {} if source.batching is None else source.batching.inputs
    profiles = settle_profiles(inputs, given, axes, source.unbatched)
    if profiles and not given:
        for name, bounds in profiles[0].items():
            teller.say(f"profile derived for {name}: {bounds} (rows gave the same answers alone and together)")
    drop = request.max_top1_drop
    if drop is None and request.recipe.precision == "int8":
        drop = INT8_TOP1_DROP
    return _Work(source, path, source_digest(path), rows, profiles, drop)


def _rows(request: PlanRequest, source: Card, path: Path, inputs: Sequence[TensorSpec]) -> Rows | None:
    """The calibration rows, or the sample that the model was registered with."""
    if request.calibration is not None:
        return read_rows(request.calibration, inputs)
    if source.sample is None:
        return None
    sample = read_sample(path.with_name(source.sample))
    named = {spec.name: sample.get(spec.name, sample.get(spec.name.replace("/", "_"))) for spec in inputs}
    feed = {name: array for name, array in named.items() if array is not None}
    return fixed_rows([feed], made_up=True) if len(feed) == len(inputs) else None


def _converted(request: PlanRequest, work: _Work, folder: Path, teller: Teller) -> Converted:
    source = work.source
    name = f"{source.model.replace('/', '~')}-{source.version}.{request.recipe.precision}.onnx"
    converted = convert(work.onnx, folder / name, work.digest, work.rows, request.recipe, teller.stage)
    if request.recipe.precision != "fp32":
        teller.say(f"{request.recipe.precision}: {converted.note}{' (converted earlier)' if converted.reused else ''}")
    if converted.gate is not None:
        teller.say(f"accuracy gate: {gate_words(converted.gate)}")
        check(converted.gate, converted.worst, work.drop)
    elif request.recipe.precision != "fp32":
        teller.say("accuracy gate: not run, there are no rows (give --calibration, or register with a --sample)")
    return converted


def _stopped(work: _Work, converted: Converted, why: str) -> PlanOutcome:
    source = work.source
    left = (
        f"{why}. The conversion is done and kept as {converted.path}. What is left is the builder: run the same "
        f"`qworker build` on a machine with an NVIDIA GPU of the kind that will serve {source.model}, with "
        "qworker[gpu] and this store; it takes the conversion from there. Or test the build here with --target rtx"
    )
    return replace(_outcome(work, converted, None, reused=False), left=left)


def _outcome(work: _Work, converted: Converted, card: Card | None, *, reused: bool) -> PlanOutcome:
    gate = None if converted.gate is None else converted.gate.model_copy(update={"max_top1_drop": work.drop})
    return PlanOutcome(work.source.model, work.source.version, card, gate, converted.note, converted.path, reused)


# --- the plan -----------------------------------------------------------------------------------


def _already(
    store: LocalStore, request: PlanRequest, work: _Work, kit: Toolkit, device: DeviceFacts | None
) -> Card | None:
    """The same build, of the same source in the same way, on the same kind of device."""
    for card in plan_cards(store, work.source.model, work.source.version):
        plan = card.plan
        if plan is not None and (
            plan.target == request.target
            and plan.precision == request.recipe.precision
            and plan.library_version == kit.version
            and plan.compute_capability == (None if device is None else device.compute_capability)
            and plan.source_sha256 == work.digest
            and plan.profiles == _entries(work.profiles)
            and plan.options == _options(request, work)
        ):
            return card
    return None


def _build(
    store: LocalStore,
    request: PlanRequest,
    work: _Work,
    converted: Converted,
    kit: Toolkit,
    device: DeviceFacts | None,
    teller: Teller,
) -> Card:
    teller.say(f"building with {kit.name}{'' if device is None else f' on {device.name}'}")
    with store.stage() as staging, tempfile.TemporaryDirectory(prefix="qworker-") as folder:
        model = release_names(read_model(converted.path), work.profiles)
        onnx = write_model(model, Path(folder) / "model.onnx")[0]
        del model
        built = build_plan(kit, onnx, work.profiles, staging.folder / "plan", request.builder, teller.watch)
        measured = None if device is None else measure(kit, built.path, work.profiles, request.device)
        plan = _plan(request, work, converted, built, measured, device)
        name = plan_name(work.source.model, work.source.version, plan)
        built.path.rename(staging.folder / name)
        entry = staging.adopt(name)
        samples = tuple(file for file in work.source.files if file.name == work.source.sample)
        card = Card(
            model=work.source.model,
            version=work.source.version,
            backend="tensorrt",
            files=(entry, *samples),
            sample=work.source.sample,
            inputs=work.source.inputs,
            outputs=work.source.outputs,
            resident_bytes=_resident(plan),
            load_seconds=0.0 if measured is None else round(measured.load_seconds, 4),
            warmed=work.source.warmed,
            runtime=kit.name,
            created=datetime.now(UTC),
            **_batching(work, plan),
            plan=plan,
        )
        return publish_plan(store, staging, card)


def _plan(
    request: PlanRequest,
    work: _Work,
    converted: Converted,
    built: BuiltPlan,
    measured: Measured | None,
    device: DeviceFacts | None,
) -> Plan:
    known: dict[str, Any] = {"weights_bytes": built.weights_bytes or built.nbytes, "io_bytes": _input_bytes(work)}
    if measured is not None:
        known = {
            name: getattr(measured, name)
            for name in ("weights_bytes", "context_bytes", "io_bytes", "free_memory_delta", "batch_ms")
        }
    if device is not None:
        known |= {
            "cuda_version": device.cuda,
            "driver_version": device.driver,
            "compute_capability": device.compute_capability,
            "device": device.name,
        }
    return Plan(
        target=request.target,
        precision=request.recipe.precision,
        library_version=built.version,
        version_compatible=request.builder.version_compatible,
        lean_runtime=request.builder.version_compatible,
        hardware_compatibility=built.hardware_compatibility,
        flags=built.flags,
        profiles=_entries(work.profiles),
        source_sha256=work.digest,
        options=_options(request, work),
        build_seconds=round(built.seconds, 3),
        measured=measured is not None,
        gate=None if converted.gate is None else converted.gate.model_copy(update={"max_top1_drop": work.drop}),
        **known,
    )


def _entries(profiles: Sequence[Profile]) -> tuple[dict[str, RangeEntry], ...]:
    return tuple(
        {name: RangeEntry(min=r.min, opt=r.opt, max=r.max, values=r.values) for name, r in profile.items()}
        for profile in profiles
    )


def _options(request: PlanRequest, work: _Work) -> dict[str, Option]:
    """Everything beside source and profiles that changes what is built; paths stay out of it."""
    builder = request.builder
    calibration: Mapping[str, Option] = {}
    if request.recipe.precision == "int8" and work.rows is not None:
        calibration = {"calibration_rows": work.rows.count, "calibration_digest": work.rows.digest}
    return {
        "level": builder.level,
        "workspace": builder.workspace,
        "tf32": builder.tf32,
        "version_compatible": builder.version_compatible,
        "hardware_compatible": builder.hardware_compatible,
        **request.recipe.options(),
        **calibration,
    }


def _input_bytes(work: _Work) -> tuple[int, ...]:
    """Inputs at their largest, for each profile: without a device the outputs' sizes are not known."""
    sizes: list[int] = []
    for profile in work.profiles or ({},):
        total = 0
        for entry in work.source.inputs:
            bounds = profile.get(entry.name)
            shape = bounds.max if bounds is not None and not bounds.values else tuple(entry.shape or ())
            elements = 1
            for dim in shape:
                elements *= dim if isinstance(dim, int) else 1
            total += elements * itemsize(entry.datatype)
        sizes.append(total)
    return tuple(sizes)


def _batching(work: _Work, plan: Plan) -> dict[str, Any]:
    """As the source was verified, within the profiles; the run times are this plan's own."""
    batching = work.source.batching
    if batching is None:
        return {"unbatched": work.source.unbatched}
    sizes = [
        {at: _rows_of(profile, batching.inputs, at) for at in ("opt", "max")} for profile in plan.profiles if profile
    ]
    most = max((size["max"] for size in sizes), default=1)
    times = {sizes[time.profile][time.at]: time.ms / 1000 for time in plan.batch_ms if time.profile < len(sizes)}
    return {
        "batching": batching.model_copy(update={"max_rows": most}),
        "run_times": tuple(RunTime(rows=rows, seconds=seconds) for rows, seconds in sorted(times.items())),
    }


def _rows_of(profile: Mapping[str, RangeEntry], axes: Mapping[str, int], at: str) -> int:
    """The rows that a profile takes at its best or largest: the fewest that any input allows."""
    given = [(profile[name], axis) for name, axis in axes.items() if name in profile]
    return min((getattr(bounds, at)[axis] for bounds, axis in given), default=1)


def _resident(plan: Plan) -> int:
    """What a ledger holds for it: weights, one context and one set of inputs and outputs; or more if seen."""
    counted = plan.weights_bytes + max(plan.context_bytes, default=0) + max(plan.io_bytes, default=0)
    return max(counted, plan.free_memory_delta or 0, 1)
