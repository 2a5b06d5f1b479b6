"""Where the watch's steps go beside its own record: a file, TensorBoard, W&B, MLflow, trackio, Prometheus, or your own object.

A sink is anything with the three methods of `Sink`. `ghoststep.watch(..., sinks=["tensorboard:runs/a", MySink()])` takes both
specs and objects. No sink can hurt a training: one that raises is closed with one warning.
"""

from __future__ import annotations

from ghoststep.sinks.base import Sink
from ghoststep.sinks.fan_out import Sinks
from ghoststep.sinks.keys import metrics
from ghoststep.sinks.spec import SPECS, open_sink

__all__ = ["SPECS", "Sink", "Sinks", "metrics", "open_sink"]
