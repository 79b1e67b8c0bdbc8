"""A custom optimizer: Lion, whose update is the sign of a momentum (Chen et al. 2023, arXiv:2302.06675).

    cd examples
    recycle train parallel=2x2 optimizer.name=custom optimizer.build=lion:Lion optimizer.lr=3e-4 +fail_at=20:1.1

To check the optimizer without a job:

    python -c "from recycle_pp.testing.update_rules import check; check('lion:Lion')"
"""

from recycle_pp.numerics.update_rules.rule import UnitRule


class Lion(UnitRule):
    vectors = ("momentum",)
    unit_size = 1 << 20  # the step is elementwise, so units may be rows; without this line they are whole tensors

    def __init__(self, settings):
        self.beta1, self.beta2 = settings.beta1, settings.beta2

    def step(self, weight, grad, state, *, lr, decay, step):
        momentum = state["momentum"]
        direction = momentum.lerp(grad, 1 - self.beta1).sign_()
        weight.mul_(1 - lr * decay).sub_(direction, alpha=lr)
        momentum.lerp_(grad, 1 - self.beta2)
