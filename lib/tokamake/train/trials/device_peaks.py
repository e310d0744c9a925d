"""Peaks of devices in floating-point operations a second, for the model FLOPs utilization (MFU)."""

KNOWN_PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "A100": 312.0,
    "MI250X": 191.5,  # of a die, which is a device for torch
    "MI250": 181.0,  # of a die
    "MI300X": 1307.4,
    "Max 1550": 419.4,  # of a stack, which by default is a device for torch
}
"""Dense TFLOP/s in bf16 or fp16, from data sheets, by a part of torch's name of the device; the
first match counts."""


def known_peak(name: str, precision: str) -> float | None:
    """Peak TFLOP/s of a device in 16-bit formats by its name; None: unknown, or fp32."""
    if precision == "fp32":
        return None
    return next((peak for part, peak in KNOWN_PEAKS.items() if part in name), None)
