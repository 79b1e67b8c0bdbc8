"""Writes curves and events for TensorBoard to RUN_DIR/tensorboard. To see them: `tensorboard --logdir runs`.

The Text tab shows the events under the tag `events`. It shows only the last text of a step, so each text repeats the
earlier events of its step. The curve `events/deaths` counts deaths. `events/stall_ms` and `events/lost_ops` have a
point for every recovery, and `islands/...` for every round of an island. TensorBoard's own package, which does not need
torch, writes the files.
"""

from __future__ import annotations

import time

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from recycle_pp.telemetry.events.catalog import parse
from recycle_pp.telemetry.run_folder import RunFolder

from .exporter import MEASURES, Curves, Exporter, Record


class TensorBoard(Exporter):
    def __init__(self, run: RunFolder) -> None:
        self._steps = run.steps()
        self._writer = EventFileWriter(str(run.path / "tensorboard"))
        self._curves = Curves()
        self._texts: tuple[int, list[str]] = -1, []  # the newest step with events, and their sentences

    def step(self, record: Record) -> None:
        self._scalars(record["step"], {key: record[key] for key in MEASURES if record.get(key) is not None})

    def event(self, record: Record) -> None:
        event = parse(record)
        if values := self._curves.of(event):
            self._scalars(event.step, values, event.time)
        if event.exported:
            earlier = self._texts[1] if self._texts[0] == event.step else []
            self._texts = event.step, [*earlier, event.sentence(self._steps)]
            self._text(event.step, "\n\n".join(self._texts[1]), event.time)

    def close(self) -> None:
        self._writer.close()

    def _scalars(self, step: int, values: Record, at: float | None = None) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(step, summary, at)

    def _text(self, step: int, sentence: str, at: float) -> None:
        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[sentence.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._write(step, Summary(value=[Summary.Value(tag="events", metadata=about, tensor=tensor)]), at)

    def _write(self, step: int, summary: Summary, at: float | None) -> None:
        self._writer.add_event(Event(wall_time=at or time.time(), step=step, summary=summary))
