"""The fixed parts of a script that replays a layer; nothing in them comes from elsewhere."""

from __future__ import annotations

__all__ = ["FILL", "LOAD", "MAIN", "MAKE"]

LOAD = '''
def load(path):
    """The module in a file."""
    spec = importlib.util.spec_from_file_location("_" + Path(path).stem, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).parent))
    spec.loader.exec_module(module)
    return module
'''

MAKE = '''
def make(kind, **parts):
    """A module whose constructor is not run: its attributes and children are set instead."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer
'''

FILL = '''
def fill(layer, tensors):
    """Put the weights and buffers in their places."""
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        owner, _, last = name.rpartition(".")
        if kind == "weights":
            value = torch.nn.Parameter(value, requires_grad=False)
            setattr(layer.get_submodule(owner), last, value)
        elif kind == "buffers":
            layer.get_submodule(owner).register_buffer(last, value)
'''

MAIN = """
def main():
    tensors = load_file(Path(__file__).with_suffix(".safetensors"), device=DEVICE)
    layer = build(tensors)
    with torch.no_grad():
        found = outputs(call(layer, tensors))
    bad = False
    for name, got in found.items():
        both = (tensors[name], got)
        expected, got = (torch.view_as_real(t) if t.is_complex() else t for t in both)
        expected, got = expected.double(), got.double()
        if expected.shape != got.shape:
            print(f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}")
            bad = True
            continue
        finite = expected.isfinite() & got.isfinite()
        odd = ~finite & (expected != got) & ~(expected.isnan() & got.isnan())
        off, size = (got - expected)[finite], float(expected[finite].norm())
        error = float(off.norm()) / (size or 1.0)
        most, mean = (float(off.abs().max()), float(off.abs().mean())) if len(off) else (0.0, 0.0)
        print(f"{name}: relative L2 error {error:.6g} (tolerance {TOLERANCE[name]:.3g}), "
              f"max abs {most:.6g}, mean abs {mean:.6g}, NaN or Inf at odds {int(odd.sum())}")
        bad = bad or bool(odd.any()) or error > TOLERANCE[name]
    print("The output differs." if bad else "The output is as expected.")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
"""
