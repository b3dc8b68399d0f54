"""Priors: the right device, the right size, the right order of magnitude, and marked as what they are."""

from __future__ import annotations

import pytest

from weighbridge.core.errors import InputError
from weighbridge.cost.prior import DEVICES, PRIOR_ERROR, find_device, model_size, prior_profile
from weighbridge.cost.profile import decode_profile, encode_profile

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA H100 80GB HBM3", "H100"),
    ],
)
def test_devices_are_found_by_the_drivers_name(told: str, known: str) -> None:
    assert find_device(told) == DEVICES[known]


def test_sizes_follow_from_the_configuration() -> None:
    size = model_size(LLAMA_8B)
    assert size.parameters == pytest.approx(8.03e9, rel=0.01)
    assert size.kv_bytes_per_token == 131072
    experts = model_size(LLAMA_8B | {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000})
    assert experts.parameters == pytest.approx(46.7e9, rel=0.02)
    assert experts.active_parameters == pytest.approx(12.9e9, rel=0.02)
    with pytest.raises(InputError, match="lacks vocab_size"):
        model_size({k: v for k, v in LLAMA_8B.items() if k != "vocab_size"})


def test_a_prior_is_of_the_measured_order_and_marked() -> None:
    profile = prior_profile(model_size(LLAMA_8B), "NVIDIA GeForce RTX 4090", name="llama")
    assert profile.source == "prior"
    assert profile.error == PRIOR_ERROR
    assert profile.step is not None
    # a fit to a recorded run on this card gave 20 ms, 88 us per prefill token and 100 ns per KV token
    assert 0.010 < profile.step.base_s < 0.040
    assert 44e-6 < profile.step.prefill_s < 260e-6
    assert 50e-9 < profile.step.kv_s < 250e-9
    assert profile.limits.kv_blocks == pytest.approx(2588, rel=0.15)
    assert decode_profile(encode_profile(profile)) == profile


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="no data sheet of 'Abacus'"):
        prior_profile(model_size(LLAMA_8B), "Abacus")
    big = model_size(LLAMA_8B | {"num_hidden_layers": 320})
    with pytest.raises(InputError, match="do not fit into 1 x L4"):
        prior_profile(big, "L4")
    assert prior_profile(big, "H200", devices=2).source == "prior"
