"""Muon updates whole matrices inside layers, AdamW everything else."""

import pytest
import torch

from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.numerics.update_rules.muon import orthogonalised
from recycle_pp.state import checkpoint
from recycle_pp.state.checkpoint_tensors import pieces, tensors_of

from ..in_process import CPU, everything, gradient, part, same, small
from .test_units import cut

CONFIG = small(optimizer__name="muon", parallel__stages=1, parallel__pipelines=2, numerics__reproducible=True)


def test_matrices_inside_layers_have_one_state_vector_and_all_other_parameters_have_two():
    for tied in (False, True):
        stage = Stage(CONFIG.with_values({"model.tied": tied}), 0, CPU)
        momentum = {name for k, name in enumerate(stage.names) if stage.names_of(k) == ("model", "momentum_buffer")}
        assert momentum == {name for name, p in stage.parameters.items() if name.startswith("layers.") and p.dim() == 2}
        others = [stage.names_of(k) for k, name in enumerate(stage.names) if name not in momentum]
        assert len(others) > 3 and {*others} == {("model", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 20)])
def test_an_orthogonalised_matrix_has_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    singular = torch.linalg.svdvals(orthogonalised(matrix, 5).float())
    assert singular.min() > 0.5 and singular.max() < 1.3
    assert (orthogonalised(torch.zeros(shape), 5) == 0).all()


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_checkpoint_of_units_has_the_vectors_of_each_rule_and_resumes_whole_and_sharded(moments, tmp_path):
    config = CONFIG.with_values({"optimizer.moments": moments})
    stage = cut(Stage(config, 0, CPU), 256)
    optimizer, units = StageOptimizer(config, stage, whole=False), range(len(stage.layout.units))
    for unit in units:
        optimizer.begin(unit)
    for step in range(2):
        optimizer.step(gradient(stage, step, units), step)

    def save(member, saved):
        return checkpoint.Saver(tmp_path).save(2, member, pieces(optimizer, stage, saved), tensors_of(stage)).result()

    found = checkpoint.load(checkpoint.finish(tmp_path, 2, [save("0.0", units[::2]), save("1.0", units[1::2])], {}))
    kept = {"model": torch.float32, "exponent": torch.int32}
    half = torch.bfloat16 if moments == "bf16" else torch.float32
    assert all(tensor.dtype == kept.get(name.split(".")[0], half) for name, tensor in found.items())
    whole = StageOptimizer(config, Stage(config, 0, CPU))
    whole.resume(lambda names: {name: found[name] for name in names})
    assert same(everything(whole), found)
    again = Stage(config, 0, CPU)
    sharded = StageOptimizer(config, again, whole=False)
    sharded.resume(lambda names: {name: found[name] for name in names})
    for unit in range(len(again.layout.units)):
        sharded.begin(unit)
    reduced = gradient(again, 2)
    whole.step(reduced, 2)
    sharded.step(part(again, reduced, range(len(again.layout.units))), 2)
    assert same(dict(again.parameters), dict(whole.tensors.parameters))
    assert any(name.startswith("momentum_buffer.") and tensor.abs().max() > 0 for name, tensor in found.items())
