"""Batches of decode_cases whose pages lie far out in a cache so large that only what is used of it has memory."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np

from decode_cases import Made
from mla_rt import plan
from mla_rt.device import Device
from plan_cases import Arrays, options_of, table_of


def decode_far(device: Device, made: Made, pages: Any) -> tuple[np.ndarray, np.ndarray]:
    """The batch with entry i of its kv_indices moved to page pages[i], in a cache that ends behind the last of them. All else in it was never
    written: on the emulator zeros without memory."""
    pages = np.asarray(pages, np.int64)
    with ExitStack() as resources:
        arrays = resources.enter_context(Arrays(device, made))
        cache, num_pages = vars(arrays.cache), int(pages.max()) + 1

        def moved(near: Any) -> Any:
            if near is None:
                return None
            page_bytes = near.nbytes // arrays.cache.num_pages
            contents = near.download((arrays.cache.num_pages, page_bytes), np.uint8)
            far = resources.enter_context(device.allocate(num_pages * page_bytes))
            for page, source in zip(pages.tolist(), made.arguments["kv_indices"], strict=True):
                far.upload(contents[source], offset=page * page_bytes)
            return far

        arrays.cache = SimpleNamespace(**{**cache, "num_pages": num_pages, "rows": moved(cache["rows"]), "scales": moved(cache["scales"])})
        a_plan = resources.enter_context(plan(device, **{**table_of(made), "kv_indices": pages}, **options_of(made)))
        return arrays.run_for_results(a_plan)
