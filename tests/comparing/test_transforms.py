"""Layouts that two shapes allow, as views."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tensortap.comparing.sketch import agreement, sample
from tensortap.comparing.transforms import Transform, layouts, reorderings


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def found(reference: torch.Tensor, candidate: torch.Tensor) -> list[Transform]:
    """The layouts under which the two are equal."""
    options = layouts(tuple(reference.shape), tuple(candidate.shape))
    return [t for t in options if torch.equal(*t.views(reference, candidate))]


x = numbered(2, 3, 4, 5)

CASES = {
    "NCHW from NHWC": (x, x.permute(0, 2, 3, 1), "permute (0, 3, 1, 2)"),
    "NHWC from NCHW": (x.permute(0, 2, 3, 1), x, "permute (0, 2, 3, 1)"),
    "transposed": (numbered(3, 4), numbered(3, 4).T, "permute (1, 0)"),
    "sequence first": (
        numbered(2, 7, 5),
        numbered(2, 7, 5).transpose(0, 1),
        "permute (1, 0, 2)",
    ),
    "squeezed": (numbered(2, 1, 5), numbered(2, 1, 5)[:, 0], "squeeze axis 1 of the reference"),
    "unsqueezed": (
        numbered(2, 5),
        numbered(2, 5)[:, :, None, None],
        "squeeze axes 2 and 3 of the candidate",
    ),
    "a batch of one": (numbered(1, 6, 8), numbered(6, 8), "squeeze axis 0 of the reference"),
    "a scalar": (numbered(1).reshape(()), numbered(1), "squeeze axis 0 of the candidate"),
    "squeezed and permuted": (
        numbered(2, 3, 4),
        numbered(2, 3, 4).permute(2, 0, 1)[:, None],
        "squeeze axis 1 of the candidate, permute (1, 2, 0)",
    ),
    "flattened": (numbered(2, 3, 4), numbered(6, 4), "flatten axes 0..1 of the reference"),
    "unflattened": (numbered(6, 4), numbered(2, 3, 4), "flatten axes 0..1 of the candidate"),
    "flattened features": (x, x.flatten(1), "flatten axes 1..3 of the reference"),
    "both ends flattened": (
        x,
        x.reshape(6, 20),
        "flatten axes 0..1 and axes 2..3 of the reference",
    ),
    "heads": (
        x.transpose(1, 2).flatten(2),  # (batch, time, heads * width)
        x,  # (batch, heads, time, width)
        "permute (0, 2, 1, 3), flatten axes 2..3 of the candidate",
    ),
    "heads of the reference": (
        x,
        x.transpose(1, 2).flatten(2),
        "permute (0, 2, 1, 3), flatten axes 2..3 of the reference",
    ),
    "padded at the end": (
        numbered(2, 60, 3),
        torch.cat([numbered(2, 60, 3), torch.zeros(2, 4, 3)], 1),
        "padding: first 60 of 64 on axis 1",
    ),
    "padded at the front": (
        torch.cat([torch.zeros(2, 4, 3), numbered(2, 60, 3)], 1),
        numbered(2, 60, 3),
        "padding: last 60 of 64 on axis 1",
    ),
    "padded channels": (
        numbered(2, 5, 12),
        torch.nn.functional.pad(numbered(2, 5, 12), (0, 4)),
        "padding: first 12 of 16 on axis 2",
    ),
    "padded on two axes": (
        numbered(2, 5, 12),
        torch.nn.functional.pad(numbered(2, 5, 12), (0, 4, 3, 0)),
        "padding: last 5 of 8 on axis 1, padding: first 12 of 16 on axis 2",
    ),
    "permuted and padded": (
        numbered(2, 5, 3),
        torch.nn.functional.pad(numbered(2, 5, 3), (0, 0, 0, 4)).transpose(1, 2),
        "permute (0, 2, 1), padding: first 5 of 9 on axis 1",
    ),
    "flattened and padded": (
        numbered(10, 4),
        torch.nn.functional.pad(numbered(2, 5, 4), (0, 0, 0, 2)),
        "flatten axes 0..1 of the candidate, padding: first 5 of 7 on axis 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layout_is_found_and_named(case: str):
    reference, candidate, name = CASES[case]
    assert [t.name for t in found(reference, candidate)][:1] == [name]


@pytest.mark.parametrize("case", CASES)
def test_both_sides_are_views(case: str):
    reference, candidate, _ = CASES[case]
    reference, candidate = reference.clone(), candidate.clone(memory_format=torch.preserve_format)
    for transform in layouts(tuple(reference.shape), tuple(candidate.shape)):
        left, right = transform.views(reference, candidate)
        assert left.shape == right.shape
        assert left.untyped_storage().data_ptr() == reference.untyped_storage().data_ptr()
        assert right.untyped_storage().data_ptr() == candidate.untyped_storage().data_ptr()
        assert torch.equal(transform.reference(reference), left)
        assert torch.equal(transform.candidate(candidate), right)


def test_every_layout_of_small_shapes_leads_to_equal_shapes():
    shapes = [s for n in range(4) for s in itertools.product((1, 2, 3, 4, 6), repeat=n)]
    for ours, theirs in itertools.product(shapes[::3], shapes[::2]):
        for transform in layouts(ours, theirs):
            assert transform.name
            assert transform.fits(ours, theirs)


def test_shapes_with_nothing_in_common_have_no_layout():
    assert layouts((2, 3), (5, 7)) == ()
    assert layouts((2, 3, 4), (5, 7, 6)) == ()
    assert layouts((0, 3), (3, 0)) == ()
    assert layouts((2, 3), (2, 3)) == ()


def test_axes_of_extent_one_are_interchangeable():
    assert len(layouts((1, 1, 1, 5), (5, 1, 1, 1))) == 1
    assert reorderings((1, 1, 5)) == ()


def test_the_number_of_layouts_is_bounded():
    assert len(layouts((2,) * 6, (4, 16))) <= 400
    assert layouts((2,) * 9, (2,) * 8 + (3,)) == ()


def test_reorderings_keep_the_shape():
    assert reorderings((2, 3, 4)) == ()
    assert [t.name for t in reorderings((2, 5, 5))] == ["permute (0, 2, 1)"]
    assert len(reorderings((3, 3, 3))) == 5


def test_a_transform_fits_other_extents_of_its_kind():
    (transform,) = layouts((2, 3, 4, 5), (2, 4, 5, 3))
    assert transform.fits((7, 8, 9, 10), (7, 9, 10, 8))
    assert not transform.fits((7, 8, 9, 10), (7, 8, 9, 10))
    assert not transform.fits((2, 3), (3, 2))
    padding = layouts((2, 60, 3), (2, 64, 3))[0]
    assert padding.fits((1, 61, 3), (1, 65, 3))
    assert not padding.fits((1, 61, 3), (1, 65, 4))


# --- the samples on which it is decided ------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.int64,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
def test_any_dtype_can_be_sampled_through_any_view(dtype: torch.dtype):
    tensor = torch.randn(40, 30, 20).mul(10).to(dtype)
    view = tensor.permute(2, 0, 1)[3:]
    values = sample(view, 100)
    dense = view.contiguous() if dtype.itemsize > 1 or not dtype.is_floating_point else view
    assert len(values) == (200 if dtype.is_complex else 100)
    assert (values == sample(dense.clone(), 100)).all()


def test_a_sample_of_a_small_tensor_is_all_of_it():
    assert sample(numbered(2, 3)).tolist() == [0, 1, 2, 3, 4, 5]
    assert sample(torch.tensor(3.0)).tolist() == [3.0]
    assert sample(torch.empty(0, 3)).tolist() == []


def test_agreement_is_about_the_mean():
    """Values that share a large offset are near each other in any order."""
    torch.manual_seed(0)
    ours, theirs = (100 + torch.randn(2, 500)).unbind()
    assert not agreement(ours, theirs).clear
    assert agreement(ours, ours + 0.1 * theirs.sub(100)).clear
    assert agreement(ours, ours).exact


def test_what_hardly_varies_proves_nothing():
    zeros = torch.zeros(50)
    assert not agreement(zeros, zeros).telling and agreement(zeros, zeros).exact
    assert not agreement(zeros, zeros + 1).clear
    mask = torch.arange(50) > 20
    assert not agreement(mask, mask).telling
    assert agreement(numbered(50), numbered(50)).telling


def test_a_few_nans_do_not_hide_that_two_tensors_are_the_same():
    torch.manual_seed(0)
    ours = torch.randn(1000)
    theirs = ours.clone()
    theirs[7] = math.nan
    assert agreement(ours, theirs).exact
    theirs[:500] = math.nan
    assert not agreement(ours, theirs).clear
