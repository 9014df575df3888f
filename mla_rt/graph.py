"""Graphs: work captured on a stream once, launched again as a whole. `Device.capture` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .device import Device
from .errors import DeviceError
from .resources import Resource, Stream


class Graph(Resource):
    """Launches and fills as they were captured: with the arguments of then, on what the memory holds when it is launched.

    While it is open it keeps what they use: closing a buffer, module or plan that is part of it raises DeviceError.
    """

    def __init__(self, device: Device):
        super().__init__(device, None)
        self._kept: dict[int, Any] = {}

    def keep(self, *used: Any) -> None:
        """Keep these alive, and refuse the closing of buffers, modules and the like among them, until the graph is closed."""
        for each in used:
            if id(each) not in self._kept:
                self._kept[id(each)] = each
                if isinstance(each, Resource):
                    each._num_graphs += 1

    def launch(self, stream: Stream | None = None) -> None:
        """Queue all of it on the stream. DeviceError if HIP refuses it, or if it was not captured to its end."""
        handle = self.handle
        if handle is None:
            raise DeviceError("Graph launched before its capture has ended")
        self.device._require_no_capture("launch of a graph")
        self.device._launch_graph(handle, self.device._stream_handle(stream))

    def _release(self) -> None:
        for each in self._kept.values():
            if isinstance(each, Resource):
                each._num_graphs -= 1
        self._kept.clear()
        if self._handle is not None:
            self.device._destroy_graph(self._handle)

    def __repr__(self) -> str:
        return f"<Graph that keeps {len(self._kept)} others{'' if self._open else ', closed'}>"


@contextmanager
def capture(device: Device, stream: Stream) -> Iterator[Graph]:
    """`Device.capture`."""
    if not isinstance(stream, Stream):
        raise TypeError(f"capture on a {type(stream).__name__}; a Stream is needed (the default stream cannot be captured)")
    handle = device._stream_handle(stream)
    if handle is None:
        raise ValueError("capture on the default stream, which cannot be captured")
    if device._capture is not None:
        raise DeviceError("a capture is under way on this device; end it before the next begins")
    graph = Graph(device)
    try:
        device._begin_capture(handle)
        device._capture = (stream, graph)
        try:
            yield graph
        finally:
            device._capture = None
            captured: Any = device._end_capture(handle)
    except BaseException:
        graph.close()
        raise
    graph._handle = captured
