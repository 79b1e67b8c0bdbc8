"""The best checkpoint is the validated one with the lowest loss."""

import json

from recycle_pp.telemetry.best_checkpoint import best


def lines(path, losses):
    path.write_text("".join(json.dumps({"step": step} | more) + "\n" for step, more in losses))


def test_the_best_checkpoint_has_the_lowest_finite_validation_loss(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert best(metrics, [10, 20]) is None
    held_out = {9: 3.0, 19: 1.0, 24: 0.5, 29: 2.0, 39: float("nan")}
    lines(metrics, [(step, {"val_loss": held_out[step]} if step in held_out else {}) for step in range(45)])
    assert best(metrics, [10, 20, 30, 40]) == 20
    assert best(metrics, [30, 10]) == 30 and best(metrics, [40, 41]) is None
    with metrics.open("a") as file:
        file.write('{"step": 29, "val_loss": 0.1}\n{"step": 19, "val_loss')
    assert best(metrics, [10, 20, 30]) == 30, "a step that was run again has its newest loss"
