"""TFLOP/s, MFU and the time of each phase of a step."""

import json

import pytest
from recycle_schedules import OpKind

from recycle_pp.config.compose import compose
from recycle_pp.config.settings import Settings
from recycle_pp.simulation.hardware import GPUS
from recycle_pp.telemetry.efficiency import PEAKS, Efficiency, peak_flops, phase_seconds
from recycle_pp.telemetry.progress import hardware
from recycle_pp.timing.packing import table_of
from recycle_pp.wire.messages.activity import REDUCTION

H100 = "NVIDIA H100 80GB HBM3 sm_90, 132 SMs, driver 1, cuBLAS 2, attention x, triton 3, torch 2, tcp"
CPU = "cpu AVX2, torch 2, tcp"
UNITS = {-1: [("embedding", 1000)], 0: [("a", 200), ("b", 100)], 1: [("a", 300)], 2: [("head", 1000)]}


def described(settings, platform=H100, units=UNITS):
    efficiency = Efficiency(settings)
    for stage in ((-1, 0), (1, 2), (1, 2)):  # two workers of the last stage
        efficiency.describe({layer: units[layer] for layer in stage}, platform)
    return efficiency


def test_a_token_takes_six_operations_per_parameter_outside_the_embedding_plus_attention():
    model = {"model.layers": 2, "model.heads": 4, "model.width": 32, "model.sequence": 10}
    settings = Settings().with_values(model)
    assert described(settings).flops_per_token == 6 * (300 + 300 + 1000) + 12 * 2 * 32 * 10
    assert described(settings.with_values({"emulate.mode": "sleep"})).flops_per_token is None
    assert Efficiency(settings).flops_per_token is None, "no worker has built a stage"


def test_a_hugging_face_model_counts_the_parameters_it_has_built_and_the_attention_of_its_configuration(tmp_path):
    def flops(**config):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, **config}))
        words = ["model=hf", f"model.path={tmp_path}", "model.sequence=10"]
        return described(compose(words)).flops_per_token

    assert flops(num_hidden_layers=3, num_attention_heads=4, hidden_size=32) == 6 * 1600 + 12 * 3 * 32 * 10
    assert flops(n_layer=3, n_head=4, n_embd=32) == 6 * 1600 + 12 * 3 * 32 * 10
    assert flops(num_hidden_layers=3, num_attention_heads=4, hidden_size=32, head_dim=16) == 6 * 1600 + 12 * 3 * 64 * 10
    assert flops(num_hidden_layers=3, hidden_size=32) == 6 * 1600, "no attention"
    assert flops(num_hidden_layers=3, num_local_experts=8) is None
    adapters = compose(["model=hf", f"model.path={tmp_path}", "model.lora.rank=4", "model.lora.targets=[q]"])
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "num_hidden_layers": 3}')
    assert described(adapters).flops_per_token is None, "the frozen parameters are not counted"


def test_mfu_is_the_share_of_the_peak_and_is_left_out_if_the_peak_is_unknown():
    settings = Settings().with_values({"numerics.precision": "bf16"})
    flops = described(settings).flops_per_token
    found = described(settings).of(tokens_per_second=1e9, workers=4)
    assert found == pytest.approx({"tflops": flops * 1e9 / 4 / 1e12, "mfu": flops * 1e9 / 4 / 989e12})
    assert described(settings, CPU).of(1e9, 4).keys() == {"tflops"}
    known = described(settings.with_values({"run.peak_tflops": 2.0}), CPU).of(1e9, 4)
    assert known["mfu"] == pytest.approx(known["tflops"] / 2.0)
    assert described(settings.with_values({"model.kind": "custom"})).of(1e9, 4) == {}


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("Tesla T4", None, 8.1e12),
        ("NVIDIA GeForce GT 1030", None, None),
    ],
)
def test_the_peak_of_a_gpu_depends_on_its_name_and_the_precision(name, bf16, fp32):
    platform = f"{name} sm_90, 132 SMs"
    for precision, peak in (("bf16", bf16), ("bf16-autocast", bf16), ("fp32", fp32)):
        assert peak_flops(platform, Settings().with_values({"numerics.precision": precision})) == peak


def test_the_table_of_peaks_agrees_with_that_of_the_simulator():
    bf16 = {pattern.split("|")[0].lower(): peak for pattern, peak, _ in PEAKS}
    both = bf16.keys() & GPUS.keys() - {"t4"}
    assert both >= {"a100", "h100", "h200", "b200"}
    assert {name: bf16[name] for name in both} == {name: GPUS[name].flops / 1e12 for name in both}


def test_the_phases_of_a_step_are_means_over_the_workers_and_the_rest_is_waiting():
    one = table_of([
        (OpKind.FORWARD, 0, 0, 10.0, 11.0), (OpKind.BACKWARD, 0, 0, 11.0, 13.0), (REDUCTION, 0, 0, 14.0, 14.5),
        (OpKind.OPTIMIZER, 0, 0, 9.0, 9.5),
    ])  # fmt: skip
    other = table_of([
        (OpKind.FORWARD, 0, 1, 10.0, 12.0), (OpKind.BACKWARD_INPUT, 0, 1, 12.0, 13.0),
        (OpKind.BACKWARD_WEIGHT, 0, 1, 13.0, 14.0),
    ])  # fmt: skip
    assert phase_seconds([one, other], 2, 6.0) == pytest.approx({
        "forward_seconds": 1.5, "backward_seconds": 1.5, "weight_seconds": 0.5, "reduce_seconds": 0.25,
        "optimizer_seconds": 0.25, "wait_seconds": 2.0,
    })  # fmt: skip
    assert phase_seconds([], 2, 6.0) == {}


def test_the_line_of_a_step_has_the_figures_that_are_known():
    record = {
        "tokens_per_second_per_worker": 75.2, "tflops": 312.4, "mfu": 0.3158, "peak_bytes": 51_200_000_000,
        "step_seconds": 2.0, "forward_seconds": 0.5, "backward_seconds": 0.6, "weight_seconds": 0.3,
    }  # fmt: skip
    said = ["75 tokens/s a worker", "312 TFLOP/s a worker", "MFU 31.6 %", "compute 70 %", "peak 51.2 GB"]
    assert hardware(record) == said
    assert hardware({"tokens_per_second_per_worker": 75.2}) == ["75 tokens/s a worker"]
    assert hardware({}) == []
