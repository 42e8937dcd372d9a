"""One cell of the matrix: a model made into what a runtime takes, recorded as users do, judged.

`prepare` makes the artefact and says how it is recorded; `judge` holds a recording of it against
the eager one, tensor by tensor, without the help of `tap.compare`, whose answer is checked too.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensortap as tap

from .models import MODELS, SAMPLES, SCRIPTABLE, TOKENS, Built

__all__ = [
    "RUNTIMES",
    "Cannot",
    "Runtime",
    "Verdict",
    "judge",
    "prepare",
    "record",
    "record_eager",
    "unordered",
]

CLOSE = 1e-5  # of the largest value
UNORDERED = re.compile(r"\.mlp\.(gate|experts\.act_fn)$")
"""In MiniMaxM2 the experts of a token come from `topk(sorted=False)`: in any order."""
MIXTURES = ("MixtralForCausalLM", "MiniMaxM2ForCausalLM")
ROUTED = re.compile(r"\.mlp(\.|$)|\.layers\.\d+$|norm|self_attn|lm_head|^(model)?$")
"""In a mixture rounding sends some tokens to other experts: then nothing behind is near."""
QUANTISED = 0.5  # of the root mean square: far from rounding, near enough that no layer is another


class Cannot(Exception):
    """The runtime does not take the model; the text says why."""


@dataclass(frozen=True)
class Artefact:
    """What is handed to `tap.record`, and with which options."""

    thing: Any
    options: dict[str, Any] = field(default_factory=dict)
    inside: Callable[[tap.Recording], dict[str, list[torch.Tensor]]] | None = None
    """For a quantised model: by layer every value that its output may be; `*` for any layer."""


@dataclass(frozen=True)
class Runtime:
    """A column of the matrix. `tolerance` is relative to the largest value of a tensor."""

    name: str
    title: str
    make: Callable[[Built, Path], Artefact]
    tolerance: float = 0.0
    quantised: bool = False


# Making artefacts.


def prepare(model: str, runtime: str, folder: Path) -> tuple[Artefact, Built]:
    """The model, compiled for the runtime; Cannot, with the compiler's own words, if it refuses."""
    built = MODELS[model]()
    if runtime == "scripted" and model not in SCRIPTABLE:
        raise Cannot(_unscriptable(built[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return RUNTIMES[runtime].make(built, folder), built
        except Exception as error:
            raise Cannot(_line(error)) from error


def _unscriptable(model: nn.Module) -> str:
    try:
        torch.jit.script(model)
    except Exception as error:
        return f"torch.jit.script: {_line(error)}"
    raise AssertionError("it can be scripted: put it into SCRIPTABLE")


def _line(error: BaseException) -> str:
    """The first line of an error, without what differs from run to run."""
    cause = error
    while isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m| at 0x[0-9a-f]+|: 0x[0-9a-f]+", "", str(cause))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = next((line for line in lines if "No conversion rule" in line), None)
    found = named or (lines[0] if lines else "no reason given")
    return re.sub(r"\w+(?=Config\.__init__)", "…", found).rstrip(":.")


def _traced(built: Built) -> Any:
    model, args, kwargs = built
    examples = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    return torch.jit.trace(model, strict=False, check_trace=False, **examples)


def _exported(built: Built) -> Any:
    model, args, kwargs = built
    return torch.export.export(model, args, kwargs, strict=False)


def _weights(model: nn.Module, folder: Path) -> Path:
    from safetensors.torch import save_file

    path = folder / "weights.safetensors"
    save_file(
        {name: value.contiguous().clone() for name, value in model.state_dict().items()}, path
    )
    return path


def _make_traced(built: Built, folder: Path) -> Artefact:
    path = folder / "traced.pt"
    torch.jit.save(_traced(built), path)
    return Artefact(path)


def _make_scripted(built: Built, folder: Path) -> Artefact:
    path = folder / "scripted.pt"
    torch.jit.save(torch.jit.script(built[0]), path)
    return Artefact(path)


def _make_frozen(built: Built, folder: Path) -> Artefact:
    path = folder / "frozen.pt"
    torch.jit.save(torch.jit.freeze(_traced(built).eval()), path)
    return Artefact(path, {"weights": _weights(built[0], folder)})


def _make_export(built: Built, folder: Path) -> Artefact:
    path = folder / "model.pt2"
    torch.export.save(_exported(built), path)
    return Artefact(path)


def _make_pt2e(built: Built, folder: Path) -> Artefact:
    _, args, kwargs = built
    try:
        quantised = _quantised(built, _x86_quantizer())
    except (AssertionError, ValueError):  # its patterns do not know every in-place residual
        quantised = _quantised(built, _xnnpack_quantizer())
    program = torch.export.export(quantised, args, kwargs, strict=False)
    path = folder / "int8.pt2"
    torch.export.save(program, path)
    return Artefact(path, inside=lambda _: _computed_inside(program.module(), args, kwargs))


def _quantised(built: Built, quantizer: Any) -> Any:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    observed = prepare_pt2e(_exported(built).module(), quantizer)
    observed(*built[1], **built[2])
    return convert_pt2e(observed)


def _x86_quantizer() -> Any:
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    settings = x86.get_default_x86_inductor_quantization_config()
    return x86.X86InductorQuantizer().set_global(settings)


def _xnnpack_quantizer() -> Any:
    from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

    settings = xnnpack.get_symmetric_quantization_config()
    return xnnpack.XNNPACKQuantizer().set_global(settings)


def _computed_inside(
    graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, list[torch.Tensor]]:
    """Every tensor that is computed in each module, by running the graph node by node."""
    found: dict[str, list[torch.Tensor]] = defaultdict(list)

    class Watching(torch.fx.Interpreter):
        def run_node(self, node: Any) -> Any:
            value = super().run_node(node)
            if isinstance(value, torch.Tensor):
                scopes = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
                if "quantize_per" in str(node.target):  # put in by the quantiser, in no layer
                    scopes = [*scopes, "*"]
                for path in scopes:
                    found[path].append(value.clone())
            return value

    flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
    with torch.no_grad():
        Watching(graph).run(*flat)
    return dict(found)


def _make_compile(built: Built, folder: Path) -> Artefact:
    return Artefact(torch.compile(built[0]))


def _make_aoti(built: Built, folder: Path) -> Artefact:
    path = folder / "model.pt2"
    torch.export.save(_exported(built), path)
    # Compiled once, with taps: the root is held against eager here, so no plain twin is needed.
    return Artefact(path, {"runtime": "aoti", "self_check": False})


def _onnx(built: Built, folder: Path) -> Path:
    model, args, kwargs = built
    path = folder / "model.onnx"
    torch.onnx.export(
        model, args, path, kwargs=kwargs, dynamo=True, verbose=False, external_data=False
    )
    return path


def _make_onnx(built: Built, folder: Path) -> Artefact:
    return Artefact(_onnx(built, folder))


def _make_onnx_int8(built: Built, folder: Path) -> Artefact:
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    plain, path = _onnx(built, folder), folder / "int8.onnx"
    graph = onnx.load(plain)
    del graph.graph.value_info[:]  # a quantised weight of the same name has another shape
    onnx.save(graph, folder / "untyped.onnx")
    quantize_dynamic(folder / "untyped.onnx", path)
    values = functools.partial(_namesakes, plain, path, [*built[1], *built[2].values()])
    return Artefact(path, {"names_from": plain}, values)


def _namesakes(
    plain: Path, quantised: Path, inputs: Sequence[Any], eager: tap.Recording
) -> dict[str, list[torch.Tensor]]:
    """By layer, what the quantised graph computes under the names of the layer's float values.

    Those names are found by value: a layer's are all that equal the eager output in the float
    graph, so that no rule about scopes is believed here.
    """
    floats, others = _all_values(plain, inputs), _all_values(quantised, inputs)
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name in eager.layers:
        for own in (value for call in _calls(eager[name]).values() for value in call.values()):
            for title, value in floats.items():
                alike = value.shape == own.shape and title in others
                if alike and _distance(_sorted(own), _sorted(value), False) <= CLOSE:
                    found[name].append(others[title])
    return dict(found)


def _sorted(value: torch.Tensor) -> torch.Tensor:
    """Values in an order of their own: experts may come in another."""
    return value.flatten().sort().values


def _all_values(path: Path, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Every value of an ONNX graph."""
    import onnx
    import onnxruntime

    graph = onnx.load(path)
    kept = {item.name for item in graph.graph.output}
    names = [name for node in graph.graph.node for name in node.output if name]
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in kept)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(graph.SerializeToString(), settings)
    leaves = torch.utils._pytree.tree_leaves(list(inputs))
    feed = {
        item.name: value.numpy() for item, value in zip(session.get_inputs(), leaves, strict=True)
    }
    found = session.run(None, feed)
    titles = [item.name for item in session.get_outputs()]
    return {
        title: torch.from_numpy(value.copy()) for title, value in zip(titles, found, strict=True)
    }


def _make_openvino(built: Built, folder: Path) -> Artefact:
    import openvino

    model, args, kwargs = built
    path = folder / "model.xml"
    made = openvino.convert_model(model, example_input=kwargs or args)
    openvino.save_model(made, path, compress_to_fp16=False)
    return Artefact(path)


def _instrumented(built: Built) -> Any:
    model, args, kwargs = built
    wrapped = tap.instrument(model, layers="all")
    wrapped(*args, **kwargs)
    return wrapped


def _make_instrumented_trace(built: Built, folder: Path) -> Artefact:
    wrapped = _instrumented(built)
    path = folder / "instrumented.pt"
    torch.jit.save(_traced((wrapped, *built[1:])), path)
    return Artefact(path, {"manifest": wrapped.manifest.save(path.with_suffix(".taps.json"))})


def _make_instrumented_export(built: Built, folder: Path) -> Artefact:
    wrapped = _instrumented(built)
    path = folder / "instrumented.pt2"
    torch.export.save(_exported((wrapped, *built[1:])), path)
    return Artefact(path, {"manifest": wrapped.manifest.save(path.with_suffix(".taps.json"))})


RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        Runtime("traced", "TorchScript, traced", _make_traced),
        Runtime("scripted", "TorchScript, scripted", _make_scripted),
        Runtime("frozen", "TorchScript, frozen", _make_frozen, CLOSE),
        Runtime("export", "torch.export", _make_export),
        Runtime("pt2e", "PT2E int8", _make_pt2e, quantised=True),
        Runtime("compile", "torch.compile", _make_compile, CLOSE),
        Runtime("aoti", "AOTInductor", _make_aoti, CLOSE),
        Runtime("onnx", "ONNX Runtime", _make_onnx, CLOSE),
        Runtime("onnx_int8", "ONNX int8", _make_onnx_int8, quantised=True),
        Runtime("openvino", "OpenVINO", _make_openvino, CLOSE),
        Runtime("instrument_trace", "instrumented, traced", _make_instrumented_trace),
        Runtime("instrument_export", "instrumented, exported", _make_instrumented_export),
    )
}


# Recording, as a user would.


def record(artefact: Artefact, built: Built, path: Path, **options: Any) -> tap.Recording:
    """Record every layer of an artefact."""
    settings = {"layers": "all", **artefact.options, **options}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with tap.record(artefact.thing, path, strict=True, **settings) as rec:
            rec.run(*built[1], **built[2])
    return tap.open(path)


def record_eager(model: str, path: Path) -> tap.Recording:
    """The recording that all others are held against."""
    built = MODELS[model]()
    return record(Artefact(built[0]), built, path)


# Judging.


@dataclass(frozen=True)
class Verdict:
    """How a recording stands beside the eager one."""

    expected: int
    recorded: int
    largest: float  # difference, relative to the largest value of its tensor
    missing: dict[str, list[str]]  # reason: layers
    wrong: list[str]
    leaves_missing: int = 0
    leaves_extra: int = 0  # beside right ones, of a shape that eager does not return
    checks: int = 0
    failed_checks: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.wrong and not self.failed_checks


Calls = dict[tuple[int, int], dict[str, torch.Tensor]]


def _calls(layer: Any) -> Calls:
    """The outputs of a layer, by moment and leaf."""
    found: Calls = defaultdict(dict)
    for item in layer.port("output"):
        found[item.batch, item.call][item.leaf] = item.tensor()
    return dict(found)


def judge(
    eager: tap.Recording,
    found: tap.Recording,
    runtime: Runtime,
    inside: dict[str, list[torch.Tensor]] | None = None,
) -> Verdict:
    """Hold every tensor of a recording against the eager one of its layer and call."""
    largest, recorded, absent_leaves, extra_leaves = 0.0, 0, 0, 0
    missing: dict[str, list[str]] = defaultdict(list)
    wrong: list[str] = []
    reasons = _reasons(found)
    names = set(found.layers)
    for name in eager.layers:
        ours = _calls(eager[name])
        if not ours:
            continue
        theirs = _calls(found[name]) if name in names else {}
        if unordered(eager, name) and runtime.tolerance:
            ours, theirs = _in_order(ours), _in_order(theirs)
        if not theirs:
            missing[reasons[name]].append(name)
            continue
        problems, distance, absent, extra = _judge_layer(ours, theirs, runtime)
        routed = ROUTED.search(name) is not None and _kind(eager) in MIXTURES
        if inside is not None:
            problems = [text for text in problems if not (routed and "off by" in text)]
            problems += _foreign(theirs, [*inside.get(name, []), *inside.get("*", [])])
        largest = max(largest, distance)
        absent_leaves += absent
        extra_leaves += extra
        if problems:
            wrong.append(f"{name}: {'; '.join(problems[:3])}")
        else:
            recorded += 1
    # A layer that eager never calls, though its weights are read, can have a value by weight alone.
    strangers = sorted(
        name for name in names - set(eager.layers) if found[name].records[0].provenance != "weight"
    )
    wrong += [f"{name}: the eager model has no such layer" for name in strangers]
    checks = found.manifest.self_checks
    return Verdict(
        expected=sum(1 for name in eager.layers if _calls(eager[name])),
        recorded=recorded,
        largest=largest,
        missing=dict(missing),
        wrong=wrong,
        leaves_missing=absent_leaves,
        leaves_extra=extra_leaves,
        checks=len(checks),
        failed_checks=[str(check["text"]) for check in checks if not check["passed"]],
    )


def unordered(eager: tap.Recording, name: str) -> bool:
    """Whether a layer's output may come in another order of the experts."""
    return "MiniMaxM2" in _kind(eager) and UNORDERED.search(name) is not None


def _kind(eager: tap.Recording) -> str:
    return str(eager.manifest.target.get("class", "")).rpartition(".")[2]


def _in_order(calls: Calls) -> Calls:
    """The two experts of each token in the order of their values."""
    return {
        moment: {
            leaf: value
            if value.dim() != 2 or value.shape[-1] == 4  # the router's logits are by expert
            else value.reshape(SAMPLES * TOKENS, 2, -1).sort(1).values.reshape(value.shape)
            for leaf, value in leaves.items()
        }
        for moment, leaves in calls.items()
    }


def _judge_layer(ours: Calls, theirs: Calls, runtime: Runtime) -> tuple[list[str], float, int, int]:
    problems: list[str] = []
    largest, absent, extra = 0.0, 0, 0
    if len(ours) != len(theirs):
        problems.append(f"{len(theirs)} calls, eager {len(ours)}")
    for moment in ours.keys() & theirs.keys():
        pairs, alone = _pairs(ours[moment], theirs[moment], runtime)
        if pairs:
            extra += len(alone)
        else:
            problems += [f"call {moment[1]}: {text}" for text in alone]
        absent += len(ours[moment]) - len(pairs)
        for leaf, distance in pairs:
            largest = max(largest, distance)
            limit = QUANTISED if runtime.quantised else runtime.tolerance
            if not distance <= limit:
                problems.append(f"call {moment[1]}{leaf}: off by {distance:.2g}")
    return problems, largest, absent, extra


def _pairs(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], runtime: Runtime
) -> tuple[list[tuple[str, float]], list[str]]:
    """Leaves with their distance. A leaf without a known place is the nearest of its shape."""
    left = dict(ours)
    found: list[tuple[str, float]] = []
    alone: list[str] = []
    known = [leaf for leaf in theirs if leaf in left]
    for leaf in [*known, *(leaf for leaf in theirs if leaf not in known)]:
        value = theirs[leaf]
        if leaf in left and left[leaf].shape == value.shape:
            options = [leaf]
        else:
            options = [name for name, own in left.items() if own.shape == value.shape]
        if not options:
            shapes = [list(own.shape) for own in ours.values()]
            alone.append(f"leaf {leaf!r} {list(value.shape)}, eager has {shapes}")
            continue
        distances = {name: _distance(left[name], value, runtime.quantised) for name in options}
        name = min(distances, key=distances.__getitem__)
        found.append((name, distances[name]))
        del left[name]
    return found, alone


def _distance(own: torch.Tensor, other: torch.Tensor, quantised: bool) -> float:
    """Largest difference by largest value; of quantised models root mean squares instead."""
    if own.numel() == 0:
        return 0.0
    first, second = own.double(), other.double()
    if bool((first.isfinite() != second.isfinite()).any()):
        return float("inf")
    mask = first.isfinite()
    if not bool(mask.any()):
        return 0.0 if torch.equal(first.isnan(), second.isnan()) else float("inf")
    first, second = first[mask], second[mask]
    size = (lambda x: x.square().mean().sqrt()) if quantised else (lambda x: x.abs().max())
    apart, scale = float(size(first - second)), float(size(first))
    return apart / scale if scale else (0.0 if apart == 0 else float("inf"))


def _foreign(theirs: Calls, values: Sequence[torch.Tensor]) -> list[str]:
    """Recorded tensors that the graph did not compute inside the layer."""
    return [
        f"call {moment[1]}: not computed in this layer"
        for moment, leaves in theirs.items()
        for value in leaves.values()
        if not any(_equal(value, other) for other in values)
    ]


def _equal(value: torch.Tensor, other: torch.Tensor) -> bool:
    same = value.shape == other.shape and value.dtype == other.dtype
    return same and _distance(other, value, False) <= CLOSE


def _reasons(found: tap.Recording) -> defaultdict[str, str]:
    """Why a layer has no tensor: said of it, or said by the runtime of any that it has not."""
    absent = str(found.manifest.target.get("absent") or "no reason was given")
    said = {str(item["layer"]): str(item["reason"]) for item in found.manifest.skipped}
    return defaultdict(lambda: absent, said)
