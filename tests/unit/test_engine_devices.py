"""Which device is meant, on machines that are not here."""

from __future__ import annotations

import pytest

from weighbridge.core.errors import ConfigError, ModelError
from weighbridge.engine.devices import Device, choose_device
from weighbridge.engine.instance import InstanceOptions, device_label, placement

CPU = Device("CPU", "cpu", "AMD EPYC")
CUDA = [Device("CUDA0", "gpu", "H200"), Device("CUDA1", "gpu", "L4")]
VULKAN = [Device("Vulkan0", "igpu", "Iris"), Device("Vulkan1", "gpu", "Arc")]
MAC = [Device("MTL0", "gpu", "Apple M4"), Device("BLAS", "accel", "Accelerate"), CPU]
ALL = [*VULKAN, *CUDA, CPU]


@pytest.mark.parametrize(
    ("asked", "devices", "name"),
    [
        ("cpu", ALL, None),
        ("gpu", [*CUDA, CPU], "CUDA0"),
        ("gpu", [*VULKAN, CPU], "Vulkan1"),
        ("gpu:1", [*VULKAN, CPU], "Vulkan0"),
        ("cuda", ALL, "CUDA0"),
        ("CUDA:1", ALL, "CUDA1"),
        ("vulkan:1", ALL, "Vulkan1"),
        ("cuda1", ALL, "CUDA1"),
        ("metal", MAC, "MTL0"),
        ("metal", [Device("Metal", "gpu", "Apple M1"), CPU], "Metal"),
    ],
)
def test_a_device_is_found_by_backend_number_or_name(asked: str, devices: list[Device], name: str | None) -> None:
    index = choose_device(asked, devices)
    assert (None if index is None else devices[index].name) == name


@pytest.mark.parametrize("asked", ["cuda:2", "metal", "cuda:x", "cuda:-1", "tpu", "", "blas"])
def test_what_is_not_there_is_refused_with_what_is(asked: str) -> None:
    with pytest.raises(ModelError, match=r"has Vulkan0 \(Iris\), Vulkan1 \(Arc\), CUDA0 \(H200\), CUDA1 \(L4\)"):
        choose_device(asked, ALL)
    with pytest.raises(ModelError, match="has no GPU"):
        choose_device(asked, [CPU])


def test_layers_and_the_label_follow_the_device() -> None:
    def both(**asked: object) -> tuple[tuple[int | None, int], str]:
        options = InstanceOptions(**asked)  # type: ignore[arg-type]
        return placement(options, ALL), device_label(options, ALL)

    assert both() == ((None, 0), "CPU (AMD EPYC)")
    assert both(device="cuda:1") == ((3, -1), "CUDA1 (L4)")
    assert both(device="cuda", gpu_layers=12) == ((2, 12), "CUDA0 (H200)")
    assert both(gpu_layers=-1) == ((None, -1), "Vulkan0 (Iris)")
    assert both(device="cpu") == ((None, 0), "CPU (AMD EPYC)")
    assert device_label(InstanceOptions(gpu_layers=-1), [CPU]) == "CPU (AMD EPYC)", "asked for, but there is none"
    with pytest.raises(ConfigError, match="gpu_layers"):
        InstanceOptions(device="cpu", gpu_layers=3)
