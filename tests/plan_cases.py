"""Batches of decode_cases on a device, for `mla_rt.plan` and `Plan.run`: uploaded, with outputs that are NaN until a run writes them."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from decode_cases import Made
from mla_rt.batch import Cache, make_cache
from mla_rt.device import Device
from mla_rt.resources import Buffer, Stream

TABLE = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")


def table_of(made: Made) -> dict[str, Any]:
    """The arguments of `plan` and `Plan.update` that say where the tokens are."""
    return {name: made.arguments[name] for name in TABLE}


def options_of(made: Made) -> dict[str, Any]:
    """All others of `plan`."""
    case = made.case
    options = {"num_heads": case.num_heads, "page_size": case.page_size, "kv_format": case.kv_format, "causal": case.causal}
    return {**options, "sm_scale": made.arguments["sm_scale"], "num_splits": case.num_splits}


class Arrays:
    """q, cache, out and lse of a batch in buffers of their own; a context manager that frees them."""

    def __init__(self, device: Device, made: Made):
        self._stack = ExitStack()
        self.device, self.shape = device, made.arguments["q"].shape[:2]
        self.q = self.upload(made.arguments["q"])
        self.cache = self.upload_cache(make_cache(made.arguments["kv"], made.case.page_size))
        rows = self.shape[0] * self.shape[1]
        self.out, self.lse = self.allocate(rows * 1024), self.allocate(rows * 4)
        self.poison()

    def allocate(self, nbytes: int) -> Buffer:
        return self._stack.enter_context(self.device.allocate(nbytes))

    def upload(self, array: np.ndarray) -> Buffer:
        return self._stack.enter_context(self.device.to_device(array))

    def upload_cache(self, cache: Cache) -> SimpleNamespace:
        return SimpleNamespace(
            device=self.device,
            kv_format=cache.kv_format,
            page_size=cache.rows.shape[1],
            num_pages=len(cache.rows),
            rows=self.upload(cache.rows),
            scales=None if cache.scales is None else self.upload(cache.scales),
            kv_scale=cache.kv_scale,
        )

    def poison(self) -> None:
        self.out.fill(0xFF)
        self.lse.fill(0xFF)

    def run(self, plan: Any, stream: Stream | None = None) -> None:
        plan.run(self.q, self.cache, out=self.out, lse=self.lse, stream=stream)

    def results(self, stream: Stream | None = None) -> tuple[np.ndarray, np.ndarray]:
        out = self.out.download((*self.shape, 512), np.uint16, stream).view(ml_dtypes.bfloat16)
        return out, self.lse.download(self.shape, np.float32, stream)

    def run_for_results(self, plan: Any, stream: Stream | None = None) -> tuple[np.ndarray, np.ndarray]:
        self.poison()
        self.run(plan, stream)
        return self.results(stream)

    def __enter__(self) -> Arrays:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()
