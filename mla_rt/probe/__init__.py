"""`mla-rt probe`: does this device do what the kernels assume?

Each fact is isolated in one function of src/hip/gfx9.h and shown by a kernel of src/hip/probe.hip. On a GPU this tells whether the documents, and
so the emulator, are right about it; on the emulator, whether the emulator follows the documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..code_object import code_object_path
from ..device import Device
from ..resources import Module
from .experiment import Experiment
from .facts import FACTS, Fact

POISON = 0xC5  # every byte of a result before the launch


@dataclass(frozen=True)
class Finding:
    """What a device showed of one fact. num_values: compared; num_different: not as assumed; shown: what it does instead, in words ("" if nothing);
    raw: the kernel's result, uint32."""

    fact: Fact
    num_values: int
    num_different: int
    shown: str
    raw: np.ndarray

    @property
    def confirmed(self) -> bool:
        return self.num_different == 0


def probe(device: Device, facts: tuple[Fact, ...] = FACTS) -> list[Finding]:
    """Run the facts' kernels on the device. FileNotFoundError if they were not compiled for its architecture; else as `Device.launch`."""
    with device.load(code_object_path("probe", device.arch)) as module:
        return [_find(device, module, fact) for fact in facts]


def _find(device: Device, module: Module, fact: Fact) -> Finding:
    experiment = fact.experiment()
    raw = _launch(device, module, experiment)
    observed = experiment.read(raw)
    different = experiment.differs(observed, experiment.assumed)
    count = int(different.sum())
    return Finding(fact, observed.size, count, _instead(experiment, observed, different) if count else "", raw)


def _launch(device: Device, module: Module, experiment: Experiment) -> np.ndarray:
    result = device.allocate(4 * int(np.prod(experiment.result)))
    result.fill(POISON)
    buffers = {name: device.to_device(array) for name, array in experiment.arrays.items()} | {"result": result}
    arguments: dict[str, Any] = {**buffers, **experiment.values}
    try:
        device.launch(module.kernel(experiment.kernel), experiment.grid, **arguments)
        return result.download(experiment.result, np.uint32)
    finally:
        for buffer in buffers.values():
            buffer.free()


def _instead(experiment: Experiment, observed: np.ndarray, different: np.ndarray) -> str:
    index = tuple(int(i) for i in np.argwhere(different)[0])
    place = ", ".join(f"{axis} {i}" for axis, i in zip(experiment.axes, index, strict=True))
    text = f"{int(different.sum())} of {different.size} values differ, first at {place}: {observed[index]}, not {experiment.assumed[index]}"
    for name, alternative in experiment.alternatives.items():
        if not experiment.differs(observed, alternative).any():
            return f"{name} ({text})"
    return text


def report(findings: list[Finding]) -> str:
    """A table, one fact a line, and under a contradicted one what the device does instead and where the assumption is written."""
    width = max(len(finding.fact.name) for finding in findings)
    lines = [f"{'fact':<{width}}  {'the device':<12}  {'values':>6}  the kernels assume"]
    for finding in findings:
        verdict = "confirms" if finding.confirmed else "CONTRADICTS"
        lines.append(f"{finding.fact.name:<{width}}  {verdict:<12}  {finding.num_values:>6}  {finding.fact.assumed}")
        if not finding.confirmed:
            lines.append(f"{'':<{width}}    it does: {finding.shown}")
            lines.append(f"{'':<{width}}    written in: {finding.fact.source}")
    return "\n".join(lines)


def compare_bits(findings: list[Finding], others: list[Finding]) -> str:
    """One line: in which facts two devices gave other bits, within what is assumed of both."""
    differing = [a.fact.name for a, b in zip(findings, others, strict=True) if not np.array_equal(a.raw, b.raw)]
    return f"other bits in {', '.join(differing)}" if differing else "the same bits everywhere"
