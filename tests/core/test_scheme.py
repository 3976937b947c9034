"""What the schemes of linear layers say of themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from torchwright.core.errors import ModelError, UnknownName
from torchwright.core.scheme import (
    ASKED,
    BF16,
    KEPT,
    MADE,
    SCHEMES,
    W4A8,
    W4A16,
    W8A8,
    read_scheme,
    scheme_of,
)
from torchwright.hardware.kernels import fake
from torchwright.hardware.kernels.linear import PackedForm


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
def test_its_bytes_are_those_of_the_packed_layer(scheme) -> None:
    for group in scheme.groups or (32,):
        sized = scheme_of(scheme.name, group)
        form = PackedForm(scheme=sized, in_features=256, out_features=128)
        assert form.shapes(bias=False)["packed"] == (sized.bytes_of(128 * 256), torch.uint8)
        assert scheme_of(name=form.as_dict()["scheme"], group=form.as_dict()["group_size"]) == sized
    assert scheme.operator in {**fake.FAKES, **fake.CPU_FAKES}


def test_bytes_count_what_groups_have() -> None:
    assert [scheme.bytes_of(1024) for scheme in (BF16, W8A8, W4A8)] == [2048, 1024, 512 + 32]
    assert scheme_of("w4a16", 128).bytes_of(1024) == 512 + 8


def test_products_are_of_the_types_that_are_measured() -> None:
    assert {name: (scheme.products, scheme.digits) for name, scheme in MADE.items()} == {
        "bf16": ("bfloat16", 1),
        "w8a8": ("int8", 1),
        "w4a8": ("int8", 1),
        "w4a16": ("int8", 2),
    }
    assert {scheme.products for scheme in KEPT.values()} == {"bfloat16"}


def test_what_a_user_writes_is_read_again() -> None:
    assert read_scheme(None) is read_scheme("none") is None
    for scheme in (*ASKED.values(), scheme_of("w4a8", 128)):
        assert read_scheme(str(scheme)) == scheme
    assert read_scheme("w4a16") == W4A16
    assert str(W4A16) == "w4a16:group_size=32"
    assert str(W8A8) == "w8a8"


@pytest.mark.parametrize(
    "text", ["w4a8:group_size=48", "w4a8:groups=32", "w8a8:group_size=32", "none:group_size=32"]
)
def test_an_option_that_a_scheme_lacks_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="32 or 64 or 128, for 4-bit weights only"):
        read_scheme(text)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("int4", "w4a8"),
        ("int8", "w8a8"),
        ("q4_0", "w4a8"),
        ("Q8_0", "w8a8"),
        ("q4_k_m", "w4a8"),
        ("nf4", "w4a8"),
    ],
)
def test_names_of_other_tools_point_to_the_scheme_of_as_many_bits(name: str, near: str) -> None:
    with pytest.raises(
        UnknownName, match=f"unknown quantization '{name}'.*--quantize {near} keeps weights in"
    ):
        read_scheme(name)


@pytest.mark.parametrize("name", ["bf16", "w4bf16", "w5a5"])
def test_only_what_weights_can_be_rounded_to_can_be_asked_for(name: str) -> None:
    with pytest.raises(UnknownName, match="unknown quantization"):
        read_scheme(name)


def test_it_needs_no_torch() -> None:
    code = "import sys, torchwright.core.scheme; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
