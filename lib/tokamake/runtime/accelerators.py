"""Accelerators: peak, memory and bandwidths of a rank's device, from data sheets."""

from typing import NamedTuple

from tokamake.errors import UserError, choice

KNOWN_PEAKS = {
    "H100 PCIe": (756.0, 51.2),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.4, 66.9),
    "H200": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "MI250X": (191.5, 47.9),  # of a die, which is a device for torch
    "MI250": (181.0, 45.3),  # of a die
    "MI300X": (1307.4, 163.4),
    "Max 1550": (419.4, 26.2),  # of a stack, which by default is a device for torch
}
"""Dense TFLOP/s in bf16 or fp16, and in fp32 without TF32, by a part of torch's name of the device;
the first match counts."""


def known_peak(name: str, precision: str) -> float | None:
    """Peak TFLOP/s of a device by its name; None: unknown."""
    peaks = next((peaks for part, peaks in KNOWN_PEAKS.items() if part in name), None)
    return peaks and peaks[precision == "fp32"]


class Accelerator(NamedTuple):
    """The device of a rank, in the node that it usually stands in. Bandwidths are one-way."""

    peak_tflops: float
    """Dense 10¹² operations per second in bf16 or fp16."""
    fp32_tflops: float
    """The same in fp32, without TF32, as training computes it."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second of its own memory."""
    link_bandwidth: float
    """Bytes per second to the other devices of the node."""
    network_bandwidth: float
    """Bytes per second to other nodes, for each device."""
    per_node: int
    """Devices of a node."""

    def peak(self, precision: str) -> float:
        """Dense operations per second."""
        return 1e12 * (self.fp32_tflops if precision == "fp32" else self.peak_tflops)


def _of(
    name: str, memory: float, *, bandwidth: float, link: float, net: float, per_node: int = 8
) -> Accelerator:
    """Sizes in 10⁹."""
    return Accelerator(
        *KNOWN_PEAKS[name], memory * 1e9, bandwidth * 1e9, link * 1e9, net * 1e9, per_node
    )


ACCELERATORS = {
    "a100-40gb": _of("A100", 40, bandwidth=1555, link=300, net=25),
    "a100-80gb": _of("A100", 80, bandwidth=2039, link=300, net=25),
    "h100-80gb": _of("H100", 80, bandwidth=3350, link=450, net=50),
    "h200-141gb": _of("H200", 141, bandwidth=4800, link=450, net=50),
    "mi250x-64gb": _of("MI250X", 64, bandwidth=1600, link=100, net=12.5),
    "mi300x-192gb": _of("MI300X", 192, bandwidth=5300, link=448, net=50),
    "max1550-64gb": _of("Max 1550", 64, bandwidth=1640, link=50, net=16.7, per_node=12),
}
"""Devices by name; GPUs of several parts, such as Max 1550 and MI250X, count by part."""


def accelerator(name: str, *, where: str) -> Accelerator:
    """Return a device by name; `where` begins the message about an unknown one."""
    if name not in ACCELERATORS:
        raise UserError(f"{where}: {name}: unknown device; {choice(name, [*ACCELERATORS])}")
    return ACCELERATORS[name]
